# Sourced: what a run leaves behind, found and removed.
#
#   leftovers_begin    mark the processes that will be started from here on; note what is in /dev/shm
#   leftovers_clear    end the marked processes that are still there and remove new files of
#                      /dev/shm; returns 1 when something of ours had been left
#
# The mark is an environment variable, so it also finds what has left the process group.

leftovers_begin() {
  export HPKV_RUN_MARK="$$-$RANDOM$RANDOM"
  leftovers_shm="${HPKV_SHM:-/dev/shm}"
  leftovers_before=$(ls -A "$leftovers_shm")
}

# Marked processes other than those that are looking.
leftovers_processes() {
  local folder pid
  for folder in /proc/[0-9]*; do
    pid="${folder#/proc/}"
    if [ "$pid" = "$$" ] || [ "$pid" = "$BASHPID" ]; then continue; fi
    if tr '\0' '\n' 2>/dev/null <"$folder/environ" | grep -qx "HPKV_RUN_MARK=$HPKV_RUN_MARK"; then
      echo "$pid"
    fi
  done 2>/dev/null
}

# Our processes are gone by now: what somebody still has mapped or open is not ours.
leftovers_in_use() {
  grep -qsF -- "$leftovers_shm/$1" /proc/[0-9]*/maps && return 0
  [ -n "$(find /proc/[0-9]*/fd -lname "$leftovers_shm/$1*" -print -quit 2>/dev/null)" ]
}

# A killed process holds its files until it is gone, or a zombie; ten seconds are plenty.
leftovers_await() {
  local tries
  for tries in {1..100}; do
    grep -qsE '^State:\s+[^ZX]' "/proc/$1/status" || return 0
    sleep 0.1
  done
}

leftovers_clear() {
  local pid name found=0
  for pid in $(leftovers_processes); do
    [ -d "/proc/$pid" ] || continue
    echo "left behind: process $pid ($(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | cut -c1-120))"
    kill -KILL "$pid" 2>/dev/null && found=1
    leftovers_await "$pid"
  done
  for name in $(ls -A "$leftovers_shm"); do
    if grep -qxF -- "$name" <<<"$leftovers_before" || leftovers_in_use "$name"; then continue; fi
    case "$name" in
      hpkv*)
        echo "left behind: $leftovers_shm/$name"
        found=1
        ;;
      sem.mp-* | psm_* | torch_* | sglang_*) ;; # left by SGLang and torch when they are killed
      *) continue ;;
    esac
    rm -rf "$leftovers_shm/${name:?}"
  done
  return $found
}
