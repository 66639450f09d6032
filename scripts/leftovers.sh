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

leftovers_clear() {
  local pid name found=0
  for pid in $(leftovers_processes); do
    [ -d "/proc/$pid" ] || continue
    echo "left behind: process $pid ($(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | cut -c1-120))"
    kill -KILL "$pid" 2>/dev/null && found=1
  done
  for name in $(ls -A "$leftovers_shm"); do
    if grep -qxF -- "$name" <<<"$leftovers_before"; then continue; fi
    case "$name" in
      hpkv*) ;;
      # SGLang and torch leave these when they are killed. In use, they are somebody else's.
      sem.mp-* | psm_* | torch_*)
        grep -qsF -- "$leftovers_shm/$name" /proc/[0-9]*/maps || rm -f "$leftovers_shm/${name:?}"
        continue
        ;;
      *) continue ;;
    esac
    echo "left behind: $leftovers_shm/$name"
    rm -rf "$leftovers_shm/${name:?}"
    found=1
  done
  return $found
}
