#!/bin/sh
# What the container does first: work as the owner of the folder that it is to write into.
#
# Docker makes a mounted folder that does not exist as root's, others are their user's: only root can become both. So
# the image starts as root, and what it runs has no more rights than who owns /adamae/runs or, if that is no mount,
# /data; without any mount, the image's own user. With `docker run --user` it is that user from the start.
#
# Arguments that begin with a dash or set a key are train.py's; anything else is a command.
set -eu
[ $# -gt 0 ] || set -- --help
case "$1" in
-* | *=*) set -- python train.py "$@" ;;
esac
if [ "$(id -u)" != 0 ]; then
    exec "$@"
fi
owner=adamae:adamae
for folder in /data /adamae/runs; do
    if mountpoint -q "$folder"; then
        owner=$(stat -c %u:%g "$folder")
    fi
done
if [ "$owner" = 0:0 ]; then
    exec "$@"
fi
exec setpriv --reuid "${owner%:*}" --regid "${owner#*:}" --clear-groups "$@"
