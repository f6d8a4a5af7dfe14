//! VMs with names of up to 253 characters: names and labels of other objects follow from them.

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::story;

use crate::{
    manifests,
    moves::{console, migrate, two_nodes, vm},
    network::visited,
};

#[test]
fn vm_with_a_long_name_has_a_service_and_migrates() {
    story("long-name", async |s| {
        let name = format!("{}.guest", "x".repeat(163));
        let manifest = vm("box", "Always")
            .replace("metadata: {name: box}", &format!("metadata: {{name: {name}}}"))
            .replace("    metadata: {labels: {app: box}}\n", "");
        s.apply(&manifest).await?;
        s.wait_running(&name).await?;
        let mut guest = console(s, &name).await?;
        let page = "mkdir -p /www && echo long-works > /www/index.html && httpd -p 8080 -h /www";
        guest.run(page).await?;
        guest.leave().await?;
        s.virt(&["expose", "vm", &name, "--name=long", "--port=80", "--target-port=8080"]).await?;
        s.toolbox("visitor").await?;
        let message = visited(s, "long").await.context("before the migration")?;
        ensure!(message.trim() == "long-works", "{message:?}");
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        migrate(s, &name).await?;
        let message = visited(s, "long").await.context("after the migration")?;
        ensure!(message.trim() == "long-works", "{message:?}");
        Ok(())
    });
}

#[test]
fn vmi_with_the_longest_name_runs() {
    story("longest-name", async |s| {
        let name = "n".repeat(253);
        s.apply(&manifests::kernel_vmi(&name)).await?;
        s.wait_running(&name).await?;
        s.wait_event(&name, "Started", ferrovirt_e2e_tests::TIMEOUT).await?;
        Ok(())
    });
}
