#!/bin/sh
# Version: the Rust crate tar 0.4.46, bsdtar 3.6.2 (Debian 12, libarchive-tools 3.6.2-1+deb12u5).
# Expected: `tar cf` of a disk image, unpacked by the crate, gives the image. The crate knows sparse files (EntryType::GNUSparse) and
# writes them itself.
# Seen: it reads those of the old GNU format only. bsdtar, which is the tar of macOS, FreeBSD and Windows, writes each file with holes
# in the newer form (GNU.sparse.major=1 in pax headers, also that of `tar -S --format=posix`), with no option given. The crate takes
# it for a regular file: it becomes GNUSparseFile.0/NAME, whose content is the map of the file as text, followed by the
# written parts without the holes. Nothing reports it: unpack() is Ok. A file without holes is unpacked right.
# Consequence: an importer looks at pax_extensions() of each entry and refuses or expands the form. Tests with small files, or with
# archives in the default format of GNU tar, do not show it.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cd "$work"
apt-get download -qq libarchive-tools=3.6.2-1+deb12u5 libarchive13=3.6.2-1+deb12u5 2>/dev/null || exit 3
for package in *.deb; do dpkg -x "$package" root; done
mkdir src
cat >Cargo.toml <<'TOML'
[package]
name = "finding"
version = "0.0.0"
edition = "2024"
[dependencies]
tar = "=0.4.46"
[profile.dev]
debug = false
TOML
cat >src/main.rs <<'RUST'
use std::{env::args, fs::File};

use tar::Archive;

fn main() {
    let path = args().nth(1).unwrap();
    for entry in Archive::new(File::open(&path).unwrap()).entries().unwrap() {
        let entry = entry.unwrap();
        println!("{path}: {:?} {} {}", entry.header().entry_type(), entry.path().unwrap().display(), entry.size());
    }
    Archive::new(File::open(&path).unwrap()).unpack(format!("{path}.unpacked")).unwrap();
}
RUST
cargo build --quiet --target-dir target || exit 3

# 8 MiB, of which a block in the middle is written, and the same with all blocks written.
truncate -s 8M disk.img
echo 'partition' | dd of=disk.img bs=4k seek=1024 conv=notrunc status=none
mkdir full
cat disk.img >full/disk.img
bsdtar() { LD_LIBRARY_PATH="$work/root/usr/lib/x86_64-linux-gnu" "$work/root/usr/bin/bsdtar" "$@"; }
bsdtar --version
bsdtar cf bsdtar disk.img
bsdtar cf bsdtar-full -C full --no-read-sparse disk.img
tar cSf gnu --format=gnu disk.img
tar cSf posix --format=posix disk.img
for archive in bsdtar bsdtar-full gnu posix; do
    # Other readers agree about all of them.
    tar xOf "$archive" disk.img | cmp - disk.img || exit 1
    bsdtar xOf "$archive" disk.img | cmp - disk.img || exit 1
    target/debug/finding "$archive"
done
cmp disk.img bsdtar-full.unpacked/disk.img && cmp disk.img gnu.unpacked/disk.img || exit 1
for archive in bsdtar posix; do
    [ ! -e "$archive.unpacked/disk.img" ] || exit 1
    wrong=$(echo "$archive".unpacked/GNUSparseFile.*/disk.img)
    echo "$wrong: $(stat -c %s "$wrong") bytes, begins with $(head -n 3 "$wrong" | tr '\n' ' ')"
    [ "$(stat -c %s "$wrong")" -lt 65536 ] || exit 1
    head -n 1 "$wrong" | grep -Eqx '[12]' || exit 1
done
