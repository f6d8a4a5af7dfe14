//! A guest with systemd, cloud-init, the guest agent and an SSH server.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, TIMEOUT, is_true, story_large};
use serde_json::{Value, json};
use tokio::{
    net::UdpSocket,
    process::Command,
    time::{Instant, sleep, timeout},
};

use crate::manifests;

/// Time limit from creation to a connected guest agent: a full distribution boots under emulation, beside other tests.
pub(crate) const BOOT: Duration = Duration::from_secs(900);
/// Time limit for what the guest does once it runs.
const MINUTES: Duration = Duration::from_secs(300);
const VMI: &str = "virtualmachineinstances/deb";

#[test]
fn guest_agent_reports_freezes_and_reboots_and_ssh_and_udp_connect() {
    story_large("agent", async |s| {
        let files = Files::new(&s.namespace)?;
        let key = files.key().await?;
        s.apply(SECRETS).await?;
        s.apply(&manifests::debian("deb", &key).replace("      volumes:\n", WITH_CREDENTIALS)).await?;
        let vmi = s.wait("vmi", "deb", "connect its guest agent", BOOT, is_connected).await?;
        ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
        let vmi = s
            .wait("vmi", "deb", "tell its operating system", MINUTES, |vmi| {
                vmi["status"]["guestOSInfo"]["id"] == "debian"
                    && vmi["status"]["interfaces"][0]["interfaceName"].is_string()
            })
            .await?;
        ensure!(
            vmi["status"]["interfaces"][0]["infoSource"].as_str().is_some_and(|from| from.contains("guest-agent")),
            "the interface is not known from the guest: {}",
            vmi["status"]["interfaces"]
        );

        let mut console = s.console("deb")?;
        console.login("root", "ferrovirt").await?;
        queries(s, &mut console).await?;
        credentials(s, &mut console).await?;
        probes(s).await?;
        ssh(s, &files).await?;
        datagrams(s, &mut console).await?;
        freeze(s, &mut console).await?;
        console.leave().await?;
        reboot(s).await?;
        // A guest that boots does not answer to its power button.
        s.virt(&["stop", "deb", "--force", "--grace-period", "0"]).await?;
        Ok(())
    });
}

pub(crate) fn is_connected(vmi: &Value) -> bool {
    is_true(vmi, "AgentConnected")
}

/// Returns the Secrets with a key and a password that the guest agent sets in the guest.
const SECRETS: &str = "
apiVersion: v1
kind: Secret
metadata: {name: admins}
stringData: {key: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8 of-the-story}
---
apiVersion: v1
kind: Secret
metadata: {name: passwords}
stringData: {debian: s3cret}
";
const WITH_CREDENTIALS: &str = "      accessCredentials:
      - sshPublicKey: {source: {secret: {secretName: admins}}, propagationMethod: {qemuGuestAgent: {users: [root]}}}
      - userPassword: {source: {secret: {secretName: passwords}}, propagationMethod: {qemuGuestAgent: {}}}
      readinessProbe: {exec: {command: [grep, -q, trixie, /etc/os-release]}, timeoutSeconds: 15}
      volumes:
";

/// Waits until the guest has key and password of the Secrets.
async fn credentials(s: &Story, console: &mut Console) -> Result<()> {
    s.wait("vmi", "deb", "have its credentials", MINUTES, |vmi| is_true(vmi, "AccessCredentialsSynchronized")).await?;
    let (keys, _) = console.run("cat /root/.ssh/authorized_keys").await?;
    ensure!(keys.contains("of-the-story"), "the key of the secret is not in the guest: {keys}");
    let (message, code) = console.run("grep -q '^debian:[$]' /etc/shadow").await?;
    ensure!(code == 0, "the user has no password: {message}");
    Ok(())
}

/// Checks probes through the guest agent.
async fn probes(s: &Story) -> Result<()> {
    s.wait("vmi", "deb", "be ready by its probe", MINUTES, |vmi| is_true(vmi, "Ready")).await?;
    let pod = s.launcher_pod("deb").await?;
    let pod = pod["metadata"]["name"].as_str().context("pod without name")?;
    let probe = ["virt-probe", "--domainName", "deb", "--timeoutSeconds", "10"];
    let ping = [&probe[..], &["--guestAgentPing"]].concat();
    in_time(async || s.exec(pod, &ping).await).await?;
    let echo = [&probe[..], &["--command", "echo", "--", "from", "within"]].concat();
    let message = in_time(async || s.exec(pod, &echo).await).await?;
    ensure!(message == "from within\n", "the guest says {message:?}");
    let failed = s.exec(pod, &[&probe[..], &["--command", "false"]].concat()).await;
    ensure!(failed.is_err(), "a program that fails fails no probe");
    Ok(())
}

/// Repeats a request that the guest agent of a busy guest may answer too late.
async fn in_time<T>(ask: impl AsyncFn() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + MINUTES;
    loop {
        match ask().await {
            Err(_) if Instant::now() < deadline => sleep(Duration::from_secs(1)).await,
            outcome => return outcome,
        }
    }
}

/// Returns what a command of the plugin prints about the guest.
async fn printed(s: &Story, words: &[&str]) -> Result<String> {
    in_time(async || s.virt(words).await).await
}

/// Waits until the information about the guest is as it should be: its parts come one after the other.
async fn wait_info(s: &Story, is_right: impl Fn(&Value) -> bool) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let info: Value = serde_json::from_str(&printed(s, &["guestosinfo", "deb"]).await?)?;
        if is_right(&info) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "guestosinfo: {info}");
        sleep(Duration::from_secs(1)).await;
    }
}

/// Writes a login record. The guest agent lists users from utmp, which `login` of Debian 13 does not write.
const LOGGED_IN: &str = "python3 -c \"import struct, time; open('/run/utmp', 'wb').write(struct.pack( \
    'hi32s4s32s256shhiii36x', 7, 1, b'ttyS0', b'tyS0', b'root', b'', 0, 0, 0, int(time.time()), 0))\"";

/// Checks the subresources that use the guest agent.
async fn queries(s: &Story, console: &mut Console) -> Result<()> {
    let is_complete = |info: &Value| {
        let mut commands = info["supportedCommands"].as_array().into_iter().flatten();
        let texts = [&info["os"]["kernelRelease"], &info["guestAgentVersion"], &info["timezone"]];
        info["os"]["id"] == "debian"
            && texts.iter().all(|text| text.is_string())
            && commands.any(|c| c["name"] == "guest-fsfreeze-freeze" && c["enabled"] == true)
    };
    wait_info(s, is_complete).await?;
    let table = printed(s, &["guestosinfo", "deb", "-o", "table"]).await?;
    ensure!(table.starts_with("NAME") && table.contains("Debian"), "guestosinfo as a table: {table}");

    let (message, code) = console.run(LOGGED_IN).await?;
    ensure!(code == 0, "no record of the log-in: {message}");
    // Answers of the guest agent are cached for a few seconds.
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let users: Value = serde_json::from_str(&printed(s, &["userlist", "deb"]).await?)?;
        let root = users["items"].as_array().and_then(|all| all.iter().find(|user| user["userName"] == "root"));
        if let Some(root) = root {
            ensure!(root["loginTime"].as_f64().unwrap_or_default() > 0.0, "userlist: {root}");
            break;
        }
        ensure!(Instant::now() < deadline, "root is logged in, but not in userlist: {users}");
        sleep(Duration::from_secs(1)).await;
    }

    let systems: Value = serde_json::from_str(&printed(s, &["fslist", "deb"]).await?)?;
    let root = systems["items"].as_array().and_then(|all| all.iter().find(|system| system["mountPoint"] == "/"));
    let root = root.with_context(|| format!("no root in fslist: {systems}"))?;
    let (used, total) = (root["usedBytes"].as_u64(), root["totalBytes"].as_u64());
    ensure!(used > Some(0) && total > used, "fslist: {root}");
    let yaml = printed(s, &["fslist", "deb", "-o", "yaml"]).await?;
    ensure!(yaml.contains("mountPoint: /"), "fslist as YAML: {yaml}");

    let named = format!("kubevirt_vmi_filesystem_capacity_bytes{{node=\"{}\"", s.node_of("deb").await?);
    let own = format!("namespace=\"{}\",name=\"deb\"", s.namespace);
    // The guest agent of a busy guest may answer too late for a scrape.
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let metrics = s.metrics("virt-handler").await?;
        let has = |start: &str, more: &str| {
            metrics.iter().any(|line| line.starts_with(start) && line.contains(&own) && line.contains(more))
        };
        if has(&named, "mount_point=\"/\"") && has("kubevirt_vmi_guest_load_1m{", "") {
            return Ok(());
        }
        let shown: Vec<&String> = metrics.iter().filter(|line| line.contains(&own)).collect();
        ensure!(Instant::now() < deadline, "the guest's load or file systems are not in the metrics: {shown:?}");
        sleep(Duration::from_secs(5)).await;
    }
}

/// Runs commands by SSH with the key from cloud-init and copies files in both directions.
async fn ssh(s: &Story, files: &Files) -> Result<()> {
    // The guest agent may connect before cloud-init has finished.
    let deadline = Instant::now() + MINUTES;
    let hostname = loop {
        match output(files.ssh(s, "ssh", &["-c", "hostname", "debian@vm/deb"])).await? {
            (Some(0), text) => break text,
            (code, text) => ensure!(Instant::now() < deadline, "no log-in by SSH: {code:?} {text}"),
        }
        sleep(Duration::from_secs(2)).await;
    };
    ensure!(hostname.trim() == "deb-guest", "the host's name is {hostname:?}");
    let (code, text) = output(files.ssh(s, "ssh", &["-l", "debian", "-c", "exit 7", "vmi/deb"])).await?;
    ensure!(code == Some(7), "the exit code of the command is not passed on: {code:?} {text}");

    let (here, back) = (files.path("sent"), files.path("received"));
    let sent = (0_u32..50_000).flat_map(u32::to_le_bytes).collect::<Vec<_>>();
    tokio::fs::write(&here, &sent).await?;
    for words in [[text_of(&here)?, "debian@vmi/deb:sent"], ["debian@vm/deb:sent", text_of(&back)?]] {
        let (code, text) = output(files.ssh(s, "scp", &words)).await?;
        ensure!(code == Some(0), "scp {words:?}: {code:?} {text}");
    }
    ensure!(tokio::fs::read(&back).await? == sent, "what came back is not what was sent");
    Ok(())
}

/// Port of the guest's server that returns each datagram.
const DATAGRAMS: u16 = 7000;
/// The server; the small guest has no program for UDP.
const DATAGRAM_ECHO: &str = "{ python3 -c $'import socket\\ns = socket.socket(type=socket.SOCK_DGRAM)\\n\
    s.bind((\"\", 7000))\\nwhile True: s.sendto(*s.recvfrom(65535))' & }";

/// Forwards datagrams of two local programs to the guest. Each gets its own answers, with their boundaries.
async fn datagrams(s: &Story, console: &mut Console) -> Result<()> {
    let (message, code) = console.run(DATAGRAM_ECHO).await?;
    ensure!(code == 0, "the server does not start: {message}");
    let forward = s.forward_datagrams("vmi/deb", DATAGRAMS).await?;
    let mut programs = Vec::new();
    for name in ["first", "second"] {
        let socket = UdpSocket::bind("127.0.0.1:0").await?;
        socket.connect(("127.0.0.1", forward.port)).await?;
        programs.push((name, socket));
    }
    for length in [1, 1400] {
        for (name, socket) in &programs {
            let datagram = format!("{name} {}", "x".repeat(length));
            answered(socket, datagram.as_bytes()).await.with_context(|| format!("{length} bytes of the {name}"))?;
        }
    }
    let message = forward.stop().await?;
    ensure!(message.is_empty(), "datagrams failed: {message}");
    Ok(())
}

/// Sends a datagram until it comes back: it may be lost, and the server may still start.
async fn answered(socket: &UdpSocket, datagram: &[u8]) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let mut buffer = vec![0; 65_536];
    loop {
        socket.send(datagram).await?;
        if let Ok(length) = timeout(Duration::from_secs(2), socket.recv(&mut buffer)).await {
            let answer = &buffer[..length?];
            if answer == datagram {
                return Ok(());
            }
            // A late answer to a repeated datagram of this program.
            let own = datagram.split(|byte| *byte == b' ').next().unwrap_or_default();
            ensure!(answer.starts_with(own), "another answer: {:?}", String::from_utf8_lossy(answer));
        }
        ensure!(Instant::now() < deadline, "no answer in time");
    }
}

/// Checks that the guest cannot write between freeze and thaw, the status, and the automatic thaw.
async fn freeze(s: &Story, console: &mut Console) -> Result<()> {
    let is = |status: &'static str| {
        move |vmi: &Value| vmi["status"]["fsFreezeStatus"].as_str().unwrap_or("thawed") == status
    };
    backup_hook(s, "pre").await?;
    s.wait("vmi", "deb", "be frozen", TIMEOUT, is("frozen")).await?;
    // Only /run, which is in memory, is writable.
    console.run("{ echo text > /root/written && echo done > /run/written & } 2>/dev/null").await?;
    sleep(Duration::from_secs(3)).await;
    let (_, code) = console.run("test -e /run/written").await?;
    ensure!(code == 1, "a write went through while file systems were frozen");
    let is_frozen = |info: &Value| info["fsFreezeStatus"] == "frozen" && info["os"]["id"] == "debian";
    wait_info(s, is_frozen).await.context("while frozen")?;
    // A repeated freeze succeeds without effect.
    in_time(async || s.put(VMI, "freeze", &json!({"unfreezeTimeout": "5m"})).await).await?;
    backup_hook(s, "post").await?;
    s.wait("vmi", "deb", "thaw", TIMEOUT, is("thawed")).await?;
    // A repeated thaw, too.
    in_time(async || s.put(VMI, "unfreeze", &Value::Null).await).await?;
    wait_written(console).await?;

    let asked = Instant::now();
    in_time(async || s.put(VMI, "freeze", &json!({"unfreezeTimeout": "15s"})).await).await?;
    s.wait("vmi", "deb", "be frozen again", TIMEOUT, is("frozen")).await?;
    s.wait("vmi", "deb", "thaw by itself", MINUTES, is("thawed")).await?;
    ensure!(asked.elapsed() >= Duration::from_secs(14), "it thawed before its time: {:?}", asked.elapsed());
    console.run("rm /run/written; echo text > /root/written && echo done > /run/written").await?;
    wait_written(console).await
}

/// Runs the hook of a backup program in the pod.
async fn backup_hook(s: &Story, when: &str) -> Result<()> {
    let pod = s.launcher_pod("deb").await?;
    let annotation = |name: &str| {
        let key = format!("{when}.hook.backup.velero.io/{name}");
        pod["metadata"]["annotations"][key].as_str().map(str::to_owned).with_context(|| format!("no {name} for {when}"))
    };
    ensure!(annotation("container")? == "compute", "the hook runs in another container");
    let command: Vec<String> = serde_json::from_str(&annotation("command")?)?;
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let pod = pod["metadata"]["name"].as_str().context("pod without name")?;
    in_time(async || s.exec(pod, &command).await).await.map(drop)
}

async fn wait_written(console: &mut Console) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while console.run("test -e /run/written").await?.1 != 0 {
        ensure!(Instant::now() < deadline, "the guest cannot write after the thaw");
        sleep(Duration::from_millis(500)).await;
    }
    Ok(())
}

/// Reboots from inside the guest: the guest agent disconnects, the VMI stays.
async fn reboot(s: &Story) -> Result<()> {
    let before = s.get("vmi", "deb").await?;
    s.virt(&["soft-reboot", "deb"]).await?;
    let gone = |vmi: &Value| !is_connected(vmi);
    let after = s.wait("vmi", "deb", "disconnect its guest agent", MINUTES, gone).await?;
    ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "a reboot must keep the VMI");
    ensure!(after["status"]["phase"] == "Running", "the VMI is {}", after["status"]["phase"]);
    ensure!(after["status"]["fsFreezeStatus"].as_str().unwrap_or_default() != "frozen", "{}", after["status"]);
    Ok(())
}

/// A temporary directory for the user's key and files.
struct Files(PathBuf);

impl Files {
    fn new(name: &str) -> Result<Self> {
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).with_context(|| format!("make {}", directory.display()))?;
        Ok(Self(directory))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Generates a key and returns its public half.
    async fn key(&self) -> Result<String> {
        let mut command = Command::new("ssh-keygen");
        command.args(["-q", "-t", "ed25519", "-N", "", "-C", "story", "-f"]).arg(self.path("key"));
        let (code, text) = output(command).await?;
        ensure!(code == Some(0), "ssh-keygen: {text}");
        Ok(tokio::fs::read_to_string(self.path("key.pub")).await?.trim().to_owned())
    }

    /// Runs `kubectl virt ssh` or `scp` with the key. The host key of a new guest is unknown.
    fn ssh(&self, s: &Story, program: &str, words: &[&str]) -> Command {
        let mut command = s.virt_command(&[program, "-i"]);
        command.arg(self.path("key")).arg("--known-hosts").arg(self.path("known-hosts"));
        command.args(["-t", "-oStrictHostKeyChecking=no", "-t", "-oBatchMode=yes", "-t", "-oLogLevel=ERROR"]);
        command.args(words);
        command
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Failures are ignored: the files are small and temporary.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn text_of(path: &Path) -> Result<&str> {
    path.to_str().context("the path is no text")
}

/// Returns exit code and output of a command.
async fn output(mut command: Command) -> Result<(Option<i32>, String)> {
    let command = command.stdin(std::process::Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(MINUTES, command).await.context("the command did not end")??;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&text).into_owned()))
}
