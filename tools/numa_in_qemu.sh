#!/bin/sh
# Runs the native test of arenas on an emulated machine with four NUMA nodes: two ordinary ones, one with memory only (as
# CXL appears) and one with CPUs only: without and with reserved huge pages, and in a control group with a low memory
# limit, where the kernel kills a process that allocates more.
#
#   sh tools/numa_in_qemu.sh [kernel image, such as /boot/vmlinuz-6.1.0-amd64]
#
# Optional: needs qemu-system-x86_64, g++ with a static libstdc++, python3 and a readable Linux kernel image; without
# them it says so and succeeds. (Debian: apt install qemu-system-x86; dpkg -x linux-image-*.deb unpacks a kernel.)
set -eu
cd "$(dirname "$0")/.."

skip() {
    echo "skipped: $1"
    exit 0
}

[ "$(uname -m)" = x86_64 ] || skip "this is not an x86-64 machine"
for tool in qemu-system-x86_64 g++ python3; do
    command -v $tool >/dev/null || skip "there is no $tool"
done
kernel=${1:-$(ls -1 /boot/vmlinuz-* 2>/dev/null | tail -n 1)}
[ -n "$kernel" ] && [ -r "$kernel" ] || skip "there is no kernel image to boot; name one"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat >"$work/init.cc" <<'END'
#include <cstdio>
#include <cstring>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
void write(const char* path, const char* text) {
    FILE* file = std::fopen(path, "w");
    if (!file || std::fputs(text, file) < 0 || std::fclose(file) != 0) std::printf("cannot write %s\n", path);
}
int main(int argc, char** argv) {
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mount("proc", "/proc", "proc", 0, nullptr);
    mount("sysfs", "/sys", "sysfs", 0, nullptr);
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, nullptr);
    if (fork() == 0) {
        if (argc > 1 && std::strcmp(argv[1], "limited") == 0) {
            write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
            mkdir("/sys/fs/cgroup/box", 0755);
            write("/sys/fs/cgroup/box/memory.max", "400M");
            write("/sys/fs/cgroup/box/cgroup.procs", "0");
        }
        execl("/test_arena", "test_arena", nullptr);
        _exit(127);
    }
    int status = -1;
    wait(&status);
    std::printf("exit status %d\n", status);
    std::fflush(stdout);
    reboot(RB_POWER_OFF);
}
END
g++ -O1 -static -o "$work/init" "$work/init.cc" || skip "g++ cannot link statically here"
g++ -std=c++20 -O1 -static -Icsrc/include -Icsrc/src -pthread -o "$work/test_arena" \
    csrc/tests/arena.cc csrc/src/arena.cc csrc/src/memory_facts.cc csrc/src/error.cc

# An initial file system in the "newc" format: https://docs.kernel.org/driver-api/early-userspace/buffer-format.html
python3 - "$work" <<'END'
import os
import sys

folder = sys.argv[1]
files = [("dev", 0o040755, b"", 0), ("dev/console", 0o020600, b"", 5)]
files += [(name, 0o100755, open(f"{folder}/{name}", "rb").read(), 0) for name in ("init", "test_arena")]
with open(f"{folder}/initramfs", "wb") as out:
    for inode, (name, mode, data, major) in enumerate([*files, ("TRAILER!!!", 0, b"", 0)]):
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, major, 1, len(name) + 1, 0)
        entry = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        entry += b"\0" * (-len(entry) % 4)
        out.write(entry + data + b"\0" * (-len(data) % 4))
END

for case in "0" "96" "0 -- limited"; do
    echo "== four nodes, hugepages=$case"
    timeout 200 qemu-system-x86_64 -accel tcg -cpu max -smp 3 -m 1536M -nographic -no-reboot -net none \
        -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=512M \
        -object memory-backend-ram,id=m2,size=512M \
        -numa node,nodeid=0,cpus=0,memdev=m0 -numa node,nodeid=1,cpus=1,memdev=m1 \
        -numa node,nodeid=2,memdev=m2 -numa node,nodeid=3,cpus=2 \
        -kernel "$kernel" -initrd "$work/initramfs" \
        -append "console=ttyS0 quiet panic=-1 hugepagesz=2M hugepages=$case" </dev/null >"$work/log" 2>&1 || true
    if grep -q "^cannot" "$work/log" || ! grep -q "arena: all passed" "$work/log" || ! grep -q "^4 NUMA nodes checked" "$work/log"; then
        cat "$work/log"
        exit 1
    fi
    grep -E "^(  [0-9a-f]+ (bind|interleave)|4 NUMA|skipped|arena:)" "$work/log"
done
