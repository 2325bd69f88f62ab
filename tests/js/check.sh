#!/bin/sh
# Types and formatting of webui/static. With --write it formats the files. Without npm, or if npm cannot download
# TypeScript and Prettier (about 30 MB, once), it says so and succeeds: Python's tests do not need them.
set -eu
cd "$(dirname "$0")"
if ! command -v npm >/dev/null; then
    echo "tests/js: skipped, npm is not installed"
    exit 0
fi
if ! npm ls --silent >/dev/null 2>&1 && ! npm ci --silent --no-audit --no-fund --fetch-retries 1 >/dev/null 2>&1; then
    echo "tests/js: skipped, npm cannot download TypeScript and Prettier"
    exit 0
fi
mode=--check
if [ "${1:-}" = --write ]; then mode=--write; fi
static=../../webui/static
npx prettier --config prettierrc.json --log-level warn "$mode" "$static/**/*.{js,css}" "!$static/vendor/**"
npx tsc -p tsconfig.json
echo "tests/js: types and formatting of webui/static are clean"
