#!/usr/bin/env bash
# Runs a command of the book on several hosts: starts torchrun on each, by ssh.
#
#   HOSTS="10.0.0.1:2 10.0.0.2:1" ./ssh.sh reinforce --num-observers 2
#
# HOSTS     each host, and how many workers it runs; torchrun's store is on the first
# MASTER    the first host's address, as the others see it (default: as in HOSTS)
# PORT      a port of the first host that is free (default: 29500)
# TORCHRUN  the program, the same on every host (default: torchrun)
#
# Needs bash 4.3 here, and hosts with Linux and a login shell that descends from sh.
set -euo pipefail

read -ra hosts <<< "${HOSTS:?name the hosts, as in HOSTS=\"10.0.0.1:2 10.0.0.2:1\"}"
first=${hosts[0]%:*}
master=${MASTER:-${first#*@}}

# A host's torchrun runs for as long as its input is open, which is the pipe that this
# script holds: however the script or the connection ends, torchrun ends as well.
folder=$(mktemp -d)
mkfifo "$folder/pipe"
exec 3<> "$folder/pipe"
trap 'exec 3>&-; wait; rm -r "$folder"' EXIT
trap 'exit 130' INT
trap 'exit 143' HUP TERM

# Single quotes would end it: there are none in it.
# shellcheck disable=SC2016
there='exec 3<&0
setsid "$@" < /dev/null 3<&- & run=$!
{ cat <&3; kill -TERM -$run; sleep 60; kill -KILL -$run; } > /dev/null 2>&1 & watch=$!
wait $run; code=$?
kill $watch; exit $code'

run_on() { # host, then the command
    local host=$1 quoted
    quoted=$(printf '%q ' "${@:2}")
    ssh -o BatchMode=yes "$host" "sh -c '$there' sh $quoted" 2>&1 |
        while IFS= read -r line || [[ $line ]]; do
            printf '[%s] %s\n' "$host" "$line"
        done
}

for rank in "${!hosts[@]}"; do
    command=("${TORCHRUN:-torchrun}" --nnodes "${#hosts[@]}" --node-rank "$rank"
        --nproc-per-node "${hosts[rank]##*:}"
        --master-addr "$master" --master-port "${PORT:-29500}"
        -m cdopt_tutorial "$@")
    { exec 3>&-; run_on "${hosts[rank]%:*}" "${command[@]}"; } < "$folder/pipe" &
done

for _ in "${hosts[@]}"; do
    wait -n # the first host that fails ends the script, with its code
done
