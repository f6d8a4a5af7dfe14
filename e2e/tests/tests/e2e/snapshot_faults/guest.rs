//! The guest of the rows: it counts on its disk, and its guest agent freezes the counter as a real one freezes file systems.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::Story;
use tokio::time::{Duration, Instant, sleep};

use super::{MINUTES, VM};
use crate::{
    cve_guest_agent::start_agent,
    data_volumes::{kernel_vm, storage},
    guest_agent::is_connected,
    hotplug::{HELPERS, run},
};

/// Counts on the disk `DATA`, ten times a second, while nothing is frozen. The guest agent answers a freeze late while `/run/hold`
/// exists, and keeps the number at which it froze.
const SCRIPT: &str = r#"#!/bin/sh
for block in /sys/block/vd*; do
	[ "$(cat "$block/serial")" = DATA ] && disk=/dev/${block##*/}
done
n=$(head -c 16 "$disk" | head -n 1 | tr -d '\000')
while :; do
	if mkdir /run/writing 2>/dev/null; then
		n=$((${n:-0} + 1))
		echo $n | dd of="$disk" bs=512 conv=sync,fsync,notrunc 2>/dev/null
		echo $n >/run/count.new
		mv /run/count.new /run/count
		read -r up _ </proc/uptime
		echo $up >>/run/times
		rmdir /run/writing
	fi
	usleep 100000
done &
for port in /sys/class/virtio-ports/*; do
	grep -q org.qemu.guest_agent.0 "$port/name" && device=/dev/${port##*/}
done
exec 3<>"$device" || exit 1
# Until libvirt has connected, reading ends at once.
while sleep 0.2; do
	while read -r line <&3; do
		echo "$line" >>/run/asked
		answer='{}'
		case $line in
		*guest-sync*)
			answer=${line##*:}
			answer=${answer%%\}*}
			;;
		*guest-fsfreeze-freeze*)
			while [ -e /run/hold ]; do usleep 100000; done
			until [ -e /run/frozen ] || mkdir /run/writing 2>/dev/null; do usleep 20000; done
			cp /run/count /run/at-freeze
			touch /run/frozen
			answer=1
			;;
		*guest-fsfreeze-thaw*)
			if [ -e /run/frozen ]; then
				rm /run/frozen
				rmdir /run/writing
			fi
			answer=1
			;;
		*guest-fsfreeze-status*)
			answer='"thawed"'
			[ -e /run/frozen ] && answer='"frozen"'
			;;
		esac
		printf '{"return":%s}\n' "$answer" >&3
	done
done
"#;
/// Prints the number, the one at the last freeze, and the longest time between two writes until now.
const LOOK: &str = "echo $(cat /run/count) $(cat /run/at-freeze 2>/dev/null || echo 0) \
     $({ cat /run/times; cut -d' ' -f1 /proc/uptime; } | \
     awk 'NR > 1 && $1 - last > most { most = $1 - last } { last = $1 } END { print most + 0 }')";
/// Prints the number on the disk.
const READ: &str = "head -c 16 $(disk DATA) | head -n 1 | tr -d '\\000'";

/// The guest at a moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    pub(super) count: u64,
    pub(super) at_freeze: u64,
    /// Seconds.
    pub(super) gap: f64,
}

/// Creates the VM with a disk of this class, and starts counter and guest agent.
pub(super) async fn start(s: &Story, class: &str) -> Result<()> {
    let disk = format!("source: {{blank: {{}}}}, storage: {}", storage(class, "Block", 16));
    s.apply(&kernel_vm(VM, "Always", &disk)).await?;
    s.wait_running(VM).await?;
    let mut console = s.reopen_console(VM, "root", "ferrovirt").await?;
    run(&mut console, HELPERS).await?;
    start_agent(&mut console, SCRIPT).await?;
    console.leave().await?;
    s.wait("vmi", VM, "connect its guest agent", MINUTES, is_connected).await?;
    goes_on(s, 0).await.map(drop)
}

/// Runs a command in the guest.
async fn in_guest(s: &Story, vm: &str, command: &str) -> Result<String> {
    let mut console = s.reopen_console(vm, "root", "ferrovirt").await?;
    let output = run(&mut console, command).await?;
    console.leave().await?;
    Ok(output)
}

pub(super) async fn look(s: &Story) -> Result<Numbers> {
    let seen = in_guest(s, VM, LOOK).await?;
    let words: Vec<&str> = seen.lines().last().unwrap_or_default().split_whitespace().collect();
    let [count, at_freeze, gap] = words.as_slice() else { anyhow::bail!("the guest shows {seen:?}") };
    Ok(Numbers { count: count.parse()?, at_freeze: at_freeze.parse()?, gap: gap.parse()? })
}

/// Waits until the guest has counted further.
pub(super) async fn goes_on(s: &Story, before: u64) -> Result<Numbers> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let now = look(s).await;
        match now {
            Ok(now) if now.count > before => return Ok(now),
            seen => ensure!(Instant::now() < deadline, "the guest has not written since {before}: {seen:?}"),
        }
        sleep(Duration::from_millis(500)).await;
    }
}

/// Begins another measurement of the longest time between two writes. A held guest agent answers a freeze when it is released.
pub(super) async fn prepare(s: &Story, is_held: bool) -> Result<()> {
    let hold = if is_held { "touch /run/hold" } else { "rm -f /run/hold" };
    in_guest(s, VM, &format!("{hold}; tail -n 1 /run/times >/run/last; cat /run/last >/run/times")).await.map(drop)
}

/// Lets the guest agent answer.
pub(super) async fn release(s: &Story) -> Result<()> {
    in_guest(s, VM, "rm -f /run/hold").await.map(drop)
}

/// Returns true if the guest agent has been asked for a freeze.
pub(super) async fn is_asked(s: &Story) -> Result<bool> {
    Ok(in_guest(s, VM, "grep -c guest-fsfreeze-freeze /run/asked; true").await?.lines().last() != Some("0"))
}

/// Returns the number on the disk of a running guest.
pub(super) async fn number(s: &Story, vm: &str) -> Result<u64> {
    let seen = in_guest(s, vm, &format!("{HELPERS}; {READ}")).await?;
    let number = seen.lines().last().unwrap_or_default().trim();
    number.parse().with_context(|| format!("the disk of {vm} has {seen:?}"))
}
