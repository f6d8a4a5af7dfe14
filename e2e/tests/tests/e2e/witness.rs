//! Witnesses in a guest: they go on in a migration, and show two copies of the guest.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_cluster::plan::LAN;
use ferrovirt_e2e_tests::{Console, Node, Story, own_cluster, skip};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{live_resize::run, networks};

/// Counts in the memory of the guest, ten times a second.
const COUNT: &str =
    "{ (n=0; while :; do n=$((n+1)); echo $n >/run/count; usleep 100000; done) </dev/null >/dev/null 2>&1 & }";
/// The file is empty while the counter writes it.
const LOOK: &str = "n=; while [ -z \"$n\" ]; do read -r n </run/count; done; read -r u _ </proc/uptime; \
     echo $(cat /proc/sys/kernel/random/boot_id) $n $u";

/// State of the guest at a moment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Witness {
    boot: String,
    pub(crate) count: u64,
    uptime: f64,
}

impl Witness {
    /// Starts the counter.
    pub(crate) async fn start(console: &mut Console) -> Result<Self> {
        run(console, "dmesg -n 1").await?;
        run(console, COUNT).await?;
        run(console, "until [ -s /run/count ]; do usleep 100000; done").await?;
        Self::look(console).await
    }

    /// Returns the present state.
    pub(crate) async fn look(console: &mut Console) -> Result<Self> {
        let seen = run(console, LOOK).await?;
        let words: Vec<&str> = seen.split_whitespace().collect();
        let [boot, count, uptime] = words.as_slice() else { anyhow::bail!("the guest shows {seen:?}") };
        Ok(Self { boot: (*boot).to_owned(), count: count.parse()?, uptime: uptime.parse()? })
    }

    /// Waits until the guest has gone on since an earlier look, without a restart.
    pub(crate) async fn goes_on(console: &mut Console, before: &Self) -> Result<Self> {
        let wait = format!(
            "for i in $(seq 300); do read -r n </run/count; [ \"${{n:-0}}\" -gt {} ] && break; usleep 100000; done",
            before.count + 3
        );
        run(console, &format!("{wait}; true")).await?;
        let now = Self::look(console).await?;
        ensure!(now.boot == before.boot, "the guest was restarted: {before:?} {now:?}");
        ensure!(now.count > before.count && now.uptime > before.uptime, "the guest stands still: {before:?} {now:?}");
        Ok(now)
    }
}

/// Writes a record to the first sector of a disk again and again, after it has read the former one. A record of somebody else is
/// another copy of the guest: it stays in `/run/overlap` and in the second sector. The records of two copies differ, since they
/// contain statistics of the processor. Caches are dropped so that reads reach the disk.
const WRITER: &str = "writer() { last=; n=0; while :; do \
       echo 1 >/proc/sys/vm/drop_caches; seen=$(head -c 512 $1 | head -n 1 | tr -d '\\0'); \
       [ -z \"$last\" ] || [ \"$seen\" = \"$last\" ] || { echo \"$seen instead of $last\" >>/run/overlap; \
         echo overlap | dd of=$1 bs=512 seek=1 conv=sync,fsync,notrunc 2>/dev/null; }; \
       n=$((n+1)); last=\"$n-$(cat /proc/uptime /proc/stat | md5sum | head -c 12)\"; \
       echo $last | dd of=$1 bs=512 conv=sync,fsync,notrunc 2>/dev/null; echo $n >/run/written; done; }";

/// Starts the writer on a disk of the guest, such as `/dev/vda`.
pub(crate) async fn write_alone(console: &mut Console, disk: &str) -> Result<()> {
    run(console, WRITER).await?;
    run(console, &format!("{{ writer {disk} </dev/null >/dev/null 2>&1 & }}")).await?;
    written(console, 0).await.map(drop)
}

/// Waits until the writer has written more than `before` records, and returns their number. Fails if another copy wrote.
pub(crate) async fn written(console: &mut Console, before: u64) -> Result<u64> {
    let look = format!(
        "for i in $(seq 300); do n=$(cat /run/written 2>/dev/null); [ \"${{n:-0}}\" -gt {} ] && break; usleep 100000; done; \
         echo \"${{n:-0}}\"; cat /run/overlap 2>/dev/null; true",
        before + 1
    );
    let seen = run(console, &look).await?;
    let (count, overlap) = seen.split_once('\n').unwrap_or((&seen, ""));
    ensure!(overlap.is_empty(), "two copies of the guest have written: {overlap}");
    let count: u64 = count.trim().parse().with_context(|| format!("records: {seen:?}"))?;
    ensure!(count > before, "the guest does not write any more after {before} records");
    Ok(count)
}

/// Prefix of the layer-2 network's addresses. The third number is that of the story.
const PREFIX: &str = "10.88";
/// Port of the guest's echo server.
const ECHO: u16 = 7000;

/// The network `lan` of a story on the Ethernet segment of all nodes, and a peer on one of them that holds a connection.
pub(crate) struct Lan {
    number: u8,
    node: Node,
}

impl Lan {
    /// Defines the network and enters a node, or returns `None` after a skip.
    pub(crate) async fn define(s: &Story, node: &str) -> Result<Option<Self>> {
        if own_cluster()?.is_none() || !networks::are_there(s).await? {
            skip("a layer-2 network of all nodes")?;
            return Ok(None);
        }
        // Random digits of the namespace.
        let digits = s.namespace.rsplit('-').next().and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let number = u8::try_from(digits.unwrap_or_default() % 250)?;
        let configuration =
            json!({"cniVersion": "1.0.0", "name": format!("lan-{number}"), "type": "bridge", "bridge": LAN});
        let definition = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "metadata": {"name": "lan"},
            "spec": {"config": configuration.to_string()},
        });
        s.apply(&definition.to_string()).await?;
        let node = s.enter_node(node).await?;
        node.run(&format!("ip address replace {PREFIX}.{number}.1/24 dev {LAN}")).await?;
        Ok(Some(Self { number, node }))
    }

    /// Gives the guest an address on its interface `eth1`.
    pub(crate) async fn give_address(&self, console: &mut Console) -> Result<()> {
        let number = self.number;
        let set = format!(
            "for i in $(seq 300); do [ -e /sys/class/net/eth1 ] && break; usleep 300000; done; pkill -f 'i eth1'; \
             ip addr flush dev eth1; ip link set eth1 up && ip addr add {PREFIX}.{number}.2/24 dev eth1"
        );
        run(console, &set).await.map(drop)
    }

    /// Opens a connection from the node to the guest. Numbers go there and back, twenty times a second.
    pub(crate) async fn connect(&self, console: &mut Console) -> Result<()> {
        console.serve(&format!("nc -ll -p {ECHO} -e cat"), ECHO).await?;
        let number = self.number;
        let script = format!(
            "rm -rf /tmp/lan; mkdir /tmp/lan && cd /tmp/lan && mkfifo to from && \
             {{ (nc {PREFIX}.{number}.2 {ECHO} <to >from 2>over; echo \"nc has ended with $?\" >>over) </dev/null >/dev/null 2>&1 & \
             (exec 3>to 4<from; n=0; while :; do n=$((n+1)); echo $n >&3; read -r -t 60 a <&4 || a=nothing; \
               [ \"$a\" = $n ] || {{ echo \"$a instead of $n\" >broken; exit; }}; \
               read -r u _ </proc/uptime; echo $n $u >>log; usleep 50000; \
             done) </dev/null >/dev/null 2>&1 & }}"
        );
        self.node.run(&script).await?;
        self.goes_on(0).await.map(drop)
    }

    /// Waits until the connection has carried more than `before` numbers, and returns their number and the longest pause in
    /// seconds.
    pub(crate) async fn goes_on(&self, before: u64) -> Result<(u64, f64)> {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let seen = self.node.run("cd /tmp/lan; cat log broken over 2>/dev/null; true").await?;
            let entries: Vec<(u64, f64)> = seen
                .lines()
                .map_while(|line| line.split_once(' ').and_then(|(n, u)| Some((n.parse().ok()?, u.parse().ok()?))))
                .collect();
            let rest = seen.lines().skip(entries.len()).collect::<Vec<_>>();
            ensure!(rest.is_empty(), "the connection is broken after number {:?}: {rest:?}", entries.last());
            let count = entries.last().map_or(0, |(count, _)| *count);
            if count > before + 10 {
                let pauses = entries.windows(2).map(|pair| pair[1].1 - pair[0].1);
                return Ok((count, pauses.fold(0.0, f64::max)));
            }
            ensure!(Instant::now() < deadline, "the connection has stood still since number {count}");
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// Takes the peer and its address away.
    pub(crate) async fn leave(self) -> Result<()> {
        let removed = self.node.run(&format!("ip address del {PREFIX}.{}.1/24 dev {LAN}", self.number)).await;
        self.node.leave().await?;
        removed.map(drop)
    }
}

/// Returns true if a VMI shows its interface `lan` in the guest.
pub(crate) fn has_lan(vmi: &Value) -> bool {
    let interfaces = vmi["status"]["interfaces"].as_array().into_iter().flatten();
    interfaces.into_iter().any(|shown| {
        shown["name"] == "lan" && shown["infoSource"].as_str().is_some_and(|source| source.contains("domain"))
    })
}
