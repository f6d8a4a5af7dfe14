//! A disk that moves to another claim while its guest runs.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{
    Story, TIMEOUT, own_cluster, skip,
    storage::{Backing, Storage, delete_vmis_after, on_host},
    story,
};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{
    live_resize::{condition, run},
    moves::{console, migrate, two_nodes, vm, with_claims},
    witness::{Witness, write_alone, written},
};

#[test]
fn disk_moves_to_another_claim() {
    story("volume-migration", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        if own_cluster()?.is_none() {
            return skip("storage that all nodes share");
        }
        let former = Storage::make(s, "former", Backing::Directory).await?;
        let latter = Storage::make(s, "latter", Backing::Directory).await;
        let result = match &latter {
            Ok(latter) => moved(s, &former, latter).await,
            Err(_) => Ok(()),
        };
        let gone = delete_vmis_after(s, &result).await;
        former.remove(s).await?;
        latter?.remove(s).await?;
        result.and(gone)
    });
}

async fn moved(s: &Story, former: &Storage, latter: &Storage) -> Result<()> {
    for Storage { node, directory, .. } in [former, latter] {
        on_host(s, node, &format!("truncate -s 8M {directory}/disk.img && chown 107:107 {directory}/disk.img")).await?;
    }
    let manifest = with_claims(&vm("box", "Always"), &["former"]);
    s.apply(&manifest.replace("  runStrategy:", "  updateVolumesStrategy: Migration\n  runStrategy:")).await?;
    s.wait_running("box").await?;
    let mut guest = console(s, "box").await?;
    run(
        &mut guest,
        "modprobe -qa virtio_blk; echo kept-$((40+2)) | dd of=/dev/vda bs=512 seek=8 conv=sync,fsync 2>/dev/null",
    )
    .await?;
    let witness = Witness::start(&mut guest).await?;
    write_alone(&mut guest, "/dev/vda").await?;
    let records = written(&mut guest, 0).await?;
    guest.leave().await?;

    let volumes = json!([{"name": "former", "persistentVolumeClaim": {"claimName": "latter"}}]);
    let patch = Patch::Merge(json!({"spec": {"template": {"spec": {"volumes": volumes}}}}));
    s.api("vm").patch("box", &PatchParams::default(), &patch).await?;
    let changes = |vmi: &Value| condition(vmi, "VolumesChange").is_some_and(|shown| shown["status"] == "True");
    s.wait("vmi", "box", "have a change of volumes", TIMEOUT, changes).await?;
    migrate(s, "box").await?;
    let done = |vmi: &Value| {
        condition(vmi, "VolumesChange").is_none()
            && vmi["status"]["migratedVolumes"].as_array().is_none_or(Vec::is_empty)
            && vmi["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "latter"
    };
    s.wait("vmi", "box", "have the new claim", TIMEOUT, done).await?;
    let vm = s.get("vm", "box").await?;
    ensure!(condition(&vm, "RestartRequired").is_none(), "{}", vm["status"]["conditions"]);

    let mut guest = console(s, "box").await?;
    Witness::goes_on(&mut guest, &witness).await?;
    let records = written(&mut guest, records).await?;
    let kept = run(
        &mut guest,
        "echo 1 >/proc/sys/vm/drop_caches; dd if=/dev/vda bs=512 skip=8 count=1 2>/dev/null | head -c 7",
    )
    .await?;
    ensure!(kept == "kept-42", "the disk holds {kept:?}");
    // Only the new claim is written.
    let first = |storage: &Storage| format!("head -c 512 {}/disk.img | md5sum", storage.directory);
    let before = on_host(s, &former.node, &first(former)).await?;
    let other = on_host(s, &latter.node, &first(latter)).await?;
    written(&mut guest, records + 1).await?;
    guest.leave().await?;
    ensure!(on_host(s, &former.node, &first(former)).await? == before, "the former claim is still written");
    ensure!(on_host(s, &latter.node, &first(latter)).await? != other, "the new claim is not written");
    Ok(())
}
