#!/bin/sh
# Index the answers of the last days, so that what is answered again is drafted:
#   nightly.sh MODEL          once: for a timer of systemd or cron, after midnight UTC
#   nightly.sh --daily MODEL  now, and after every midnight (UTC) until it is ended
#
# MODEL names the tokenizer: a hub id or a folder. From the environment:
#   REQUEST_LOG  folder of the logs, YYYY-MM-DD.jsonl each, as request_log.py writes them [logs]
#   INDEX        the index that is made; a running service goes on with it [answers.index]
#   KEEP_DAYS    how many finished days are indexed; logs of earlier ones are deleted [30]
#   BUILD_FLAGS  further options of `foredraft build` [--redact --strict 0.1]
#
# The index is made from all those logs each time and put in place once it is whole: a run that
# fails or is killed leaves the index of the night before, and what was taken out of the logs is
# out of the next index. Today's log is still written to and waits for the next night.
set -eu
umask 077
logs=${REQUEST_LOG:-logs} index=${INDEX:-answers.index} keep_days=${KEEP_DAYS:-30}
flags=${BUILD_FLAGS---redact --strict 0.1}

say() { echo "nightly: $*"; }
fail() { echo "nightly: $*" >&2; exit 2; }

# Run a command that ends with this script: a shell hears no signal before its foreground ends.
run() {
    "$@" &
    child=$!
    wait $child
}

# The day (UTC) of a time in seconds as a number, by GNU's date or BSD's.
day_of() { date -u -d "@$1" +%Y%m%d 2>/dev/null || date -u -r "$1" +%Y%m%d; }

day_of_log() { basename "$1" .jsonl | tr -d -; }

index_logs() {
    now=$(date +%s)
    today=$(day_of "$now")
    oldest=$(day_of $((now - keep_days * 86400)))
    expired=0
    set --
    for log in "$logs"/[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9].jsonl; do
        [ -f "$log" ] || continue
        day=$(day_of_log "$log")
        if [ "$day" -lt "$oldest" ]; then
            expired=$((expired + 1))
        elif [ "$day" -lt "$today" ] && [ -s "$log" ]; then
            set -- "$@" "$log"
        fi
    done
    if [ $# -gt 0 ]; then
        say "indexing the logs of $# of the last $keep_days days"
        # shellcheck disable=SC2086  # several options
        run foredraft build "$@" --tokenizer "$model" --output "$index" --overwrite $flags || return
    elif [ $expired -gt 0 ]; then
        remove_index || return
    else
        say "no log of a finished day in $logs: nothing to do"
    fi
    [ $expired -eq 0 ] || delete_expired
}

# All that it was made of is older than is kept.
remove_index() {
    [ -e "$index" ] || return 0
    foredraft inspect "$index" >/dev/null || return
    rm -r "$index"
    say "no log of the last $keep_days days: $index is removed; restart the service to unload it"
}

delete_expired() {
    for log in "$logs"/[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9].jsonl; do
        if [ "$(day_of_log "$log")" -lt "$oldest" ]; then
            rm -f "$log"
            say "$log was older than $keep_days days: deleted"
        fi
    done
}

is_daily=false
if [ "${1-}" = --daily ]; then
    is_daily=true
    shift
fi
[ $# -eq 1 ] || fail "name the model whose tokenizer is used, and nothing else: nightly.sh MODEL"
model=$1
case $keep_days in
    '' | 0* | *[!0-9]*) fail "KEEP_DAYS is a number of days, not '$keep_days'" ;;
esac
! $is_daily || mkdir -p "$logs"
[ -d "$logs" ] || fail "there is no folder $logs: name that of the logs in REQUEST_LOG"

child=''
trap '{ kill $child && wait $child; } 2>/dev/null || :; exit 143' INT TERM
if ! $is_daily; then
    index_logs
    exit
fi
while :; do
    index_logs || say "failed: the index stays as it is until tomorrow" >&2
    # Some minutes after midnight: the last answers of the day are written by then.
    run sleep $((86400 - $(date +%s) % 86400 + 300))
done
