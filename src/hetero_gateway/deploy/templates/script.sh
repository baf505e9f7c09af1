#!/usr/bin/env bash
# {{title}}
# Waits until all of them answer /health; Ctrl-C or SIGTERM stops all. Logs and pid files: run/.
# Needs {{needs}} on PATH. START_TIMEOUT_S, STOP_TIMEOUT_S, RUN_DIR and, for vLLM, MODEL override.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"/{{up}}

{{model}}RUN_DIR=${RUN_DIR:-$PWD/run}
START_TIMEOUT_S=${START_TIMEOUT_S:-1800}
STOP_TIMEOUT_S=${STOP_TIMEOUT_S:-{{stop_s}}}
mkdir -p -- "$RUN_DIR"

ids=() ports=() pids=()

say() { printf '%s\n' "$*" >&2; }

# Each program leads a session of its own: Ctrl-C reaches only this script, which ends them all.
start() {
  local id=$1 port=$2
  local log="$RUN_DIR/$id.log" pid_file="$RUN_DIR/$id.pid"
  shift 2
  if [[ -f $pid_file ]] && kill -0 "$(<"$pid_file")" 2>/dev/null; then
    say "$id is running already, as process $(<"$pid_file") ($pid_file)"
    exit 1
  fi
  setsid "$@" >"$log" 2>&1 </dev/null &
  ids+=("$id") ports+=("$port") pids+=("$!")
  printf '%s\n' "$!" >"$pid_file"
  say "started $id on port $port, log $log"
}

healthy() {
  (($1 == 0)) && return  # a part of an instance that answers on another machine
  timeout 5 bash -c '
    exec 3<>"/dev/tcp/127.0.0.1/$0" || exit 1
    printf "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" >&3
    read -r _ status _ <&3 && [[ $status == 200 ]]
  ' "$1" 2>/dev/null
}

alive() { kill -0 "$1" 2>/dev/null; }

# A pause that a signal cuts short: bash runs traps only between commands.
pause() { sleep "$1" & wait "$!" || true; }

stop_all() {
  local i deadline=$((SECONDS + STOP_TIMEOUT_S))
  trap '' INT TERM
  trap - EXIT
  for i in "${!pids[@]}"; do kill -TERM "${pids[i]}" 2>/dev/null || true; done
  for i in "${!pids[@]}"; do
    while alive "${pids[i]}" && ((SECONDS < deadline)); do sleep 0.2; done
    # Whatever is left of its session: vLLM has processes for its accelerators.
    kill -KILL -- "-${pids[i]}" 2>/dev/null || true
    rm -f -- "$RUN_DIR/${ids[i]}.pid"
  done
  say "stopped"
}
trap stop_all EXIT
trap 'exit 0' INT TERM

{{starts}}

for i in "${!pids[@]}"; do
  deadline=$((SECONDS + START_TIMEOUT_S))
  until healthy "${ports[i]}"; do
    if ! alive "${pids[i]}"; then
      say "${ids[i]} has ended; the end of its log:"
      tail -n 5 -- "$RUN_DIR/${ids[i]}.log" >&2
      exit 1
    fi
    if ((SECONDS >= deadline)); then
      say "${ids[i]} does not answer /health after $START_TIMEOUT_S s;" \
        "see $RUN_DIR/${ids[i]}.log"
      exit 1
    fi
    pause 0.5
  done
done
say "all ${#pids[@]} answer /health"

# One that ends later is reported and left down: the gateway sends its requests elsewhere.
down=()
while ((${#down[@]} < ${#pids[@]})); do
  pause 2
  for i in "${!pids[@]}"; do
    if [[ -z ${down[i]:-} ]] && ! alive "${pids[i]}"; then
      down[i]=1
      say "${ids[i]} has ended; see $RUN_DIR/${ids[i]}.log"
    fi
  done
done
say "all have ended"
exit 1
