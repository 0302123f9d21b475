#!/usr/bin/env bash
# Builds the operator's and the runtime's image (CPU target, or $RUNTIME_TARGET) where no registry can be reached: on bases
# made of Debian packages, with buildah in a chroot, as root. Needs buildah and mmdebstrap.
#
#   debian_images.sh FOLDER [operator] [runtime]     leaves FOLDER/{operator,runtime}.tar: docker archives of
#                                                    localhost/paceline-operator:e2e and localhost/paceline-runtime:e2e
#
# pip in the build is configured as this machine's. BUILD_FLAGS goes to `buildah build`; CPU_TORCH_INDEX says where the CPU
# build of torch comes from.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
images=("${@:2}")
[ ${#images[@]} -gt 0 ] || images=(operator runtime)
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin BUILDAH_ISOLATION=chroot
store=(--root "$folder/storage" --runroot "$folder/run")
trap 'rm -rf "$folder/storage" "$folder/run"' EXIT

base() { # base NAME VARIANT PACKAGES: an image of the Debian release that this machine runs
  local tar=$folder/$1.tar
  [ -s "$tar" ] || mmdebstrap --quiet --mode=root --variant="$2" --include="$3" --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' "$(. /etc/os-release; echo "$VERSION_CODENAME")" "$tar"
  local container; container=$(buildah "${store[@]}" from scratch)
  buildah "${store[@]}" add --quiet "$container" "$tar" / >/dev/null
  buildah "${store[@]}" commit --quiet --rm "$container" "localhost/$1" >/dev/null
}

mounts() { # flags that show the build this machine's pip configuration, certificates and local package folders
  local path
  { printf '%s\n' /etc/xdg/pip "$HOME/.config/pip" /etc/ssl/certs
    python3 -m pip config list | grep -oE '(file://)?/[^ '"'"']+' | sed -e 's#^file://##' -e 's#/simple/*$##'
  } | sort -u | while read -r path; do [ ! -d "$path" ] || printf -- '--volume %s:%s:ro ' "$path" "$path"; done
  [ ! -e /etc/pip.conf ] || printf -- '--volume /etc/pip.conf:/etc/pip.conf:ro '
}

image() { # image NAME
  local target=(); [ "$1" != runtime ] || target=(--target "${RUNTIME_TARGET:-cpu}")
  [ "$1" != runtime ] || [ -z "${CPU_TORCH_INDEX:-}" ] || target+=(--build-arg "CPU_TORCH_INDEX=$CPU_TORCH_INDEX")
  # shellcheck disable=SC2046,SC2086  # both are several words
  buildah "${store[@]}" build --quiet --layers=false $(mounts) ${BUILD_FLAGS:-} --build-arg BUILD_IMAGE=localhost/debian-build \
    --build-arg PYTHON_IMAGE=localhost/debian-python -f "$root/$1/Dockerfile" -t "localhost/paceline-$1:e2e" "${target[@]}" "$root" >/dev/null
  rm -f "$folder/$1.tar"
  buildah "${store[@]}" push --quiet "localhost/paceline-$1:e2e" "docker-archive:$folder/$1.tar:localhost/paceline-$1:e2e"
  echo "$folder/$1.tar: $(du -m "$folder/$1.tar" | cut -f1) MB"
}

base debian-python essential python3,ca-certificates,libstdc++6
base debian-build apt python3,python3-pip,python3-venv,python3-dev,gcc,g++,libc6-dev,ca-certificates
for name in "${images[@]}"; do image "$name"; done
