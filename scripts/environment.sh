# The project's own virtual environment, made once and brought up to date when pyproject.toml or constraints.txt change.
#
# Sourced by scripts/demo and scripts/test:
#     enter_environment EXTRAS      afterwards `python` is .venv/bin/python, with lockstep[EXTRAS] installed (editable)
#
# PYTHON=/path/to/python chooses the interpreter; otherwise the first of the list below that is 3.10 or newer and can
# make virtual environments. 3.11 is tried first because the versions in constraints.txt were tested on it.

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.10 python3.13}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            # The real path, since a wrapper on PATH may choose another Python in another folder.
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON is not a Python >= 3.10 with the venv module: set PYTHON to one, or leave it unset." >&2
    else
        echo "No Python >= 3.10 with the venv module was found: install one, or say PYTHON=/path/to/python $0" >&2
    fi
    return 1
}

# DeepSpeed's setup imports torch and what it is built with, so these are there before it, and it is built among them.
install_deepspeed() {
    case ",$1," in
        *,test,* | *,deepspeed,*) ;;
        *) return 0 ;;
    esac
    local tools="setuptools wheel ninja py-cpuinfo packaging psutil hjson einops msgpack tqdm pydantic numpy"
    # shellcheck disable=SC2086 # a list of words
    "$2/bin/python" -m pip install --quiet --disable-pip-version-check -c "$3" $tools &&
        "$2/bin/python" -m pip install --quiet --disable-pip-version-check -c "$3" \
            --no-build-isolation --no-deps deepspeed
}

# enter_environment EXTRAS [oldest|newest|torch-VERSION [MORE]]: with the second, .venv-oldest (-newest, -torch-VERSION)
# is the environment, in which packages have the versions that scripts/versions.py names, and the requirements MORE
# (words) are installed, too.
enter_environment() {
    local extras=$1 versions=${2:-} more=${3:-} home=.venv constraints=constraints.txt stamp wanted python
    if [ -n "$versions" ]; then
        home=.venv-$versions
        constraints=$home/constraints.txt
    fi
    stamp=$home/installed-$extras
    # The folder is part of the stamp: an environment holds absolute paths and does not survive a move.
    wanted=$({ pwd -P; echo "$more"; cat pyproject.toml constraints.txt; } | cksum)
    export PATH="$PWD/$home/bin:$PATH"
    unset PYTHONHOME
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$home/bin/python" -c '' 2>/dev/null; then
        return
    fi
    if ! "$home/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || return 1
        echo "Making $home with $("$python" --version) ..."
        "$python" -m venv --clear "$home" || return 1
    fi
    rm -f "$stamp"
    if [ -n "$versions" ]; then
        "$home/bin/python" scripts/versions.py "$versions" >"$constraints" || return 1
    fi
    echo "Installing lockstep[$extras] into $home (some minutes the first time) ..."
    # torch goes first and by its exact version: a bare "torch" would take the newest build, with gigabytes of CUDA.
    # shellcheck disable=SC2086 # a list of words
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' "$constraints")" &&
        install_deepspeed "$extras" "$home" "$constraints" &&
        "$home/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e ".[$extras]" $more &&
        printf '%s\n' "$wanted" >"$stamp"
}
