#!/usr/bin/env bash
# The page is tested in a real Chromium. Finds one, or installs Debian's where this user may; else says how.
set -u
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null 2>&1 && exit 0
done
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo -n"
if command -v apt-get >/dev/null 2>&1; then
  echo "installing Chromium for the tests of the page"
  $sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq chromium >/dev/null && exit 0
fi
cat >&2 <<'MSG'
llaisys: the tests of the page need Chromium, and it could not be installed from here.
         Debian and Ubuntu: apt-get install chromium; then run make test again.
MSG
exit 1
