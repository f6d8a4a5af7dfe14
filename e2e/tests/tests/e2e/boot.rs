//! VMs and VMIs boot and are used.

use anyhow::ensure;
use ferrovirt_e2e_tests::{TIMEOUT, story};
use serde_json::Value;

use crate::manifests;

#[test]
fn vm_boots_from_container_disk_and_user_works_on_its_console() {
    story("boot", async |s| {
        s.apply(&manifests::vm("web", "Always")).await?;
        let vmi = s.wait_running("web").await?;
        ensure!(vmi["status"]["nodeName"].is_string(), "a running VMI names its node");
        let address = s.pod_address("web").await?;
        let has_address = |vmi: &Value| vmi["status"]["interfaces"][0]["ipAddress"] == address.as_str();
        s.wait("vmi", "web", "have the address of its pod", TIMEOUT, has_address).await?;

        let vm = s
            .wait("vm", "web", "be ready", TIMEOUT, |vm| {
                vm["status"]["ready"] == true && vm["status"]["printableStatus"] == "Running"
            })
            .await?;
        ensure!(vm["status"]["created"] == true, "a running VMI is created");
        let shown = s.kubectl(&["get", "vm", "web", "-o", "wide"]).await?;
        let node = vmi["status"]["nodeName"].as_str().unwrap_or_default();
        for text in ["NODENAME", node, "IP", address.as_str(), "RUNSTRATEGY"] {
            ensure!(shown.split_whitespace().any(|word| word == text), "no {text} in {shown}");
        }

        let pod = s.launcher_pod("web").await?;
        ensure!(pod["spec"]["containers"].as_array().is_some_and(|c| c.len() == 1), "a launcher pod has one container");
        ensure!(pod["spec"]["automountServiceAccountToken"] == false, "a launcher has no token");

        let mut console = s.console("web")?;
        console.login("root", "story").await?;
        let (hostname, _) = console.run("hostname").await?;
        ensure!(hostname.contains("web-guest"), "hostname from user data, not {hostname:?}");
        let (processors, _) = console.run("nproc").await?;
        ensure!(processors.trim() == "1", "{processors:?} processors");
        let (disk, code) = console.run("test -b /dev/vda").await?;
        ensure!(code == 0, "no root disk: {disk}");
        console.leave().await?;

        // The output of the serial port is in the pod's log.
        let log = s.log(pod["metadata"]["name"].as_str().unwrap_or_default(), "compute").await?;
        ensure!(log.contains("login:"), "the pod's log shows the serial console, not {log:?}");
        Ok(())
    });
}

#[test]
fn vmi_boots_from_a_kernel_image() {
    story("kernel", async |s| {
        s.apply(&manifests::kernel_vmi("fast")).await?;
        let vmi = s.wait_running("fast").await?;
        let times = vmi["status"]["phaseTransitionTimestamps"].as_array().cloned().unwrap_or_default();
        for phase in ["Pending", "Scheduling", "Running"] {
            ensure!(times.iter().any(|t| t["phase"] == phase), "no time of {phase} in {times:?}");
        }
        let mut console = s.console("fast")?;
        console.login("root", "ferrovirt").await?;
        let (arguments, _) = console.run("cat /proc/cmdline").await?;
        ensure!(arguments.contains("console=ttyS0"), "{arguments:?}");
        console.leave().await
    });
}

#[test]
fn display_is_a_png_with_the_guests_text_console() {
    story("display", async |s| {
        s.apply(&manifests::kernel_vmi("screen")).await?;
        s.wait_running("screen").await?;
        let file = std::env::temp_dir().join(format!("{}.png", s.namespace));
        s.virt(&["vnc", "screen", "--screenshot", &file.to_string_lossy()]).await?;
        let picture = std::fs::read(&file);
        std::fs::remove_file(&file)?;
        let picture = picture?;
        ensure!(picture.starts_with(b"\x89PNG\r\n"), "not a PNG: {:?}", &picture[..picture.len().min(16)]);
        let width = u32::from_be_bytes([picture[16], picture[17], picture[18], picture[19]]);
        ensure!(width >= 640, "a display {width} pixels wide");
        Ok(())
    });
}

#[test]
fn vnc_viewer_connects_through_the_local_port() {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt};
    story("vnc", async |s| {
        s.apply(&manifests::kernel_vmi("screen")).await?;
        s.wait_running("screen").await?;
        let mut plugin =
            s.virt_command(&["vnc", "screen", "--proxy-only"]).stdout(std::process::Stdio::piped()).spawn()?;
        let mut line = String::new();
        let output = plugin.stdout.take().ok_or_else(|| anyhow::anyhow!("no output"))?;
        tokio::io::BufReader::new(output).read_line(&mut line).await?;
        let port = serde_json::from_str::<Value>(&line)?["port"].as_u64().unwrap_or_default();
        let mut viewer = tokio::net::TcpStream::connect(("127.0.0.1", u16::try_from(port)?)).await?;
        let mut greeting = [0_u8; 12];
        tokio::time::timeout(TIMEOUT, viewer.read_exact(&mut greeting)).await??;
        ensure!(greeting.starts_with(b"RFB 003."), "{:?}", String::from_utf8_lossy(&greeting));
        drop(viewer);
        let status = tokio::time::timeout(TIMEOUT, plugin.wait()).await??;
        ensure!(status.success(), "the plugin must exit with its viewer: {status}");
        Ok(())
    });
}
