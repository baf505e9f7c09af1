#!/usr/bin/env bash
# curl: models, chat, stream with usage, an unknown model's 404.
set -euo pipefail
url=$1 model=$2
ask() { curl --silent --show-error --fail-with-body -H 'content-type: application/json' "$@"; }
body() { printf '{"model": "%s", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8%s}' "$1" "${2:-}"; }
ask "$url/v1/models" | grep -q "\"$model\""
ask "$url/v1/chat/completions" -d "$(body "$model")" | grep -q '"completion_tokens":8'
streamed=$(ask -N "$url/v1/chat/completions" -d "$(body "$model" ', "stream": true, "stream_options": {"include_usage": true}')")
grep -q '"completion_tokens":8' <<<"$streamed"
[ "$(tail -n 1 <<<"$(grep . <<<"$streamed")" | tr -d '\r')" = "data: [DONE]" ]
if refusal=$(ask -w '%{http_code}' "$url/v1/chat/completions" -d "$(body unknown)"); then exit 1; fi
[[ $refusal == *model_not_found*404 ]]
echo "$(curl --version | sed -n '1s/curl \([^ ]*\).*/\1/p')|models, chat, stream with usage, 404"
