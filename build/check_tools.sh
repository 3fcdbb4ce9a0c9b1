#!/bin/sh
# Names in one line what this machine lacks for `make setup`, as the command that mends it. Prints nothing where all is there.
# Usage: check_tools.sh PYTHON [BACKENDS]
python=$1
missing=""
IFS=,
for backend in ${2:-cpu}; do
    case $backend in
        cpu) ;;
        vulkan)
            command -v glslc >/dev/null 2>&1 || missing="$missing glslc"
            test -e /usr/include/vulkan/vulkan.h || test -n "${VULKAN_SDK:-}" || missing="$missing libvulkan-dev"
            ;;
        *)
            echo "Error: BACKENDS names $backend; it takes cpu and vulkan, comma-separated" >&2
            exit 1
            ;;
    esac
done
unset IFS
command -v "$python" >/dev/null 2>&1 || missing="$missing python3"
if command -v "$python" >/dev/null 2>&1; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Error: $python is $("$python" -V 2>&1); Python 3.11 or newer is needed: make setup PYTHON=python3.11" >&2
        exit 1
    }
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
    # PyInstaller copies the shared library of Python, which some distributions keep in a package of its own.
    lib=$("$python" -c 'import sys; print(f"python3.{sys.version_info[1]}")')
    "$python" -c "import ctypes.util, sys, sysconfig; sys.exit(not sysconfig.get_config_var('Py_ENABLE_SHARED') and not ctypes.util.find_library('$lib'))" \
        || missing="$missing lib$lib"
fi
command -v c++ >/dev/null 2>&1 || missing="$missing g++"
command -v cc >/dev/null 2>&1 || missing="$missing gcc"
command -v objcopy >/dev/null 2>&1 || missing="$missing binutils"
if [ -n "$missing" ]; then
    echo "Error: this machine lacks something; this command mends it: sudo apt-get install -y$missing" >&2
    exit 1
fi
