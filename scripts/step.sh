# Sourced by the other scripts: one line per step, the log only when it fails.
#
#   step "what is done" command...
#
# The output of the command goes to a file under $HPKV_LOGS (default build/logs). While it runs, a
# line every 20 s says that it still does and what it wrote last.

hpkv_logs="${HPKV_LOGS:-build/logs}"
mkdir -p "$hpkv_logs"

step() {
  local label="$1" log begin rc=0 pid shown
  shift
  log="$hpkv_logs/$(printf '%s' "$label" | tr -cs 'A-Za-z0-9' '-' | sed 's/-*$//').log"
  begin=$SECONDS
  shown=$SECONDS
  printf '%-58s' "$label"
  "$@" >"$log" 2>&1 </dev/null &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    if [ $((SECONDS - shown)) -ge 20 ]; then
      shown=$SECONDS
      printf '\n  ... %3d s: %s' $((SECONDS - begin)) "$(tail -n 1 "$log" | tr -d '\r' | cut -c1-70)"
    fi
  done
  wait "$pid" || rc=$?
  if [ "$shown" -ne "$begin" ]; then printf '\n%-58s' ''; fi
  if [ $rc -eq 0 ]; then
    printf ' ok (%d s)\n' $((SECONDS - begin))
    return 0
  fi
  printf ' FAILED (%d s, exit code %d)\n' $((SECONDS - begin)) $rc
  printf -- '---- the end of %s\n' "$log"
  tail -n "${HPKV_LOG_TAIL:-40}" "$log" | cut -c1-240
  printf -- '----\n'
  return $rc
}
