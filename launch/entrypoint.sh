#!/bin/sh
# Entry point of the container: run as the owner of the output folder.
#
# Docker creates missing mount points as root; existing ones belong to their users. The image starts as root and drops
# its rights to the owner of /adamae/runs or, if that is no mount, of /data; without mounts, to the image's own user.
# With `docker run --user` it is that user from the start. Each user's home, with all caches, is in /adamae/cache, which
# any number of users may share as a volume.
#
# Arguments that start with a dash or set a key are passed to train.py; anything else is a command.
set -eu
[ $# -gt 0 ] || set -- --help
case "$1" in
-* | *=*) set -- python train.py "$@" ;;
esac
owner=$(id -u)
if [ "$owner" = 0 ]; then
    owner=adamae:adamae
    for folder in /data /adamae/runs; do
        if mountpoint -q "$folder"; then
            owner=$(stat -c %u:%g "$folder")
        fi
    done
    [ "$owner" = 0:0 ] || set -- setpriv --reuid "${owner%:*}" --regid "${owner#*:}" --clear-groups "$@"
fi
export HOME="/adamae/cache/${owner%:*}"
export TORCHINDUCTOR_CACHE_DIR="$HOME/.cache/torchinductor"
exec "$@"
