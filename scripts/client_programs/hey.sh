#!/usr/bin/env bash
# hey: 100 requests, 10 at a time, kept alive; all of them answered with 200.
set -euo pipefail
url=$1 model=$2
body='{"model": "'$model'", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}'
report=$(hey -n 100 -c 10 -m POST -T application/json -d "$body" "$url/v1/chat/completions")
grep -qE '\[200\][[:space:]]+100 responses' <<<"$report" || { echo "$report" >&2; exit 1; }
version=$(dpkg-query -W -f '${Version}' hey 2>/dev/null || echo unknown)
echo "${version%%-*}|100 requests, 10 at a time"
