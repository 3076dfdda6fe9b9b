#!/usr/bin/env bash
# Process 1 of a virtual node, inside its namespaces: node.sh NAME FOLDER. When it is killed, the whole node is gone.
set -u
name=$1 folder=$2
hostname "$name"
mount --make-rprivate /
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o size=4g,mode=1777 tmpfs /dev/shm
slurmd -D -f "$folder/slurm.conf" -N "$name" &
daemon=$!
trap 'kill -0 $daemon 2>/dev/null || { slurmd -D -f "$folder/slurm.conf" -N "$name" & daemon=$!; }' USR1
while :; do # bash takes up the orphans of the node
    sleep 3600 &
    wait $!
done
