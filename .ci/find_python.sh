#!/bin/sh
# Prints a Python of version 3.12 or newer, or says what to install. A candidate that cannot run (a pyenv shim without its
# version, say) is passed over.
for candidate in python3 python3.12 python3.13 python3.14 "$HOME"/.pyenv/versions/*/bin/python3; do
    path=$(command -v "$candidate" 2>/dev/null) || continue
    if "$path" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
        echo "$path"
        exit 0
    fi
done
echo "No Python of version 3.12 or newer with venv was found (looked at python3, python3.12 to 3.14 and ~/.pyenv/versions)." >&2
echo "Install one: 'apt-get install python3.12 python3.12-venv', 'brew install python@3.12' or 'pyenv install 3.12'." >&2
exit 1
