//! A disk that moves to another claim while its guest runs.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{
    Console, Story, TIMEOUT, is_true, own_cluster, skip,
    storage::{Backing, Storage, delete_vmis_after, on_host},
    story,
};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{
    live_resize::{condition, run},
    moves::{begin, console, ended, migrate, two_nodes, vm, with_claims},
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

#[test]
fn disk_moves_to_claims_of_another_mode_and_of_a_larger_size() {
    story("volume-sizes", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        if own_cluster()?.is_none() {
            return skip("storage that all nodes share");
        }
        let mut made = Vec::new();
        let result = sizes(s, &mut made).await;
        let gone = delete_vmis_after(s, &result).await;
        for storage in made {
            storage.remove(s).await?;
        }
        result.and(gone)
    });
}

/// Makes storage that stays in the list, so that it is removed.
async fn make(s: &Story, made: &mut Vec<Storage>, claim: &str, backing: Backing, mebibytes: u32) -> Result<usize> {
    made.push(Storage::make_sized(s, claim, backing, mebibytes).await?);
    Ok(made.len() - 1)
}

async fn sizes(s: &Story, made: &mut Vec<Storage>) -> Result<()> {
    // The launchers create the images: the claims are empty.
    let file = make(s, made, "data", Backing::Directory, 16).await?;
    let device = make(s, made, "device", Backing::Device, 32).await?;
    let larger = make(s, made, "larger", Backing::Directory, 48).await?;
    make(s, made, "small", Backing::Device, 24).await?;
    start(s, &["data"]).await?;
    let mut guest = console(s, "box").await?;
    let (kept, size) = (mark(&mut guest).await?, sectors(&mut guest, 16).await?);
    let witness = Witness::start(&mut guest).await?;
    write_alone(&mut guest, "/dev/vda").await?;
    let mut records = written(&mut guest, 0).await?;
    guest.leave().await?;

    // From a file system to a larger device, and to an empty file system that is larger still.
    for (claim, mebibytes, former, latter) in [("device", 32, file, device), ("larger", 48, device, larger)] {
        move_to(s, "data", claim).await?;
        let mut guest = console(s, "box").await?;
        Witness::goes_on(&mut guest, &witness).await?;
        records = written(&mut guest, records).await?;
        // The guest sees the whole claim, as a guest whose claim was expanded.
        let grown = sectors(&mut guest, mebibytes).await?;
        ensure!(grown == u64::from(mebibytes) * 2048, "the disk in claim {claim} has {grown} sectors, it had {size}");
        ensure!(read_mark(&mut guest, size).await? == kept, "the disk in claim {claim} has lost data");
        ensure_only_written(s, &mut guest, records, &made[former], &made[latter]).await?;
        guest.leave().await?;
    }

    // A claim that is too small: the guest stays, and gets its claim back.
    begin_move(s, "data", "small").await?;
    let migration = ended(s, &begin(s, "box").await?).await?;
    ensure!(migration["status"]["phase"] == "Failed", "{}", migration["status"]);
    let reason = migration["status"]["migrationState"]["failureReason"].as_str().unwrap_or_default();
    ensure!(reason.contains("smaller than the source volume"), "{}", migration["status"]);
    name_claim(s, "data", "larger").await?;
    let taken_back = |vmi: &Value| {
        vmi["status"]["migratedVolumes"].as_array().is_none_or(Vec::is_empty)
            && vmi["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "larger"
    };
    s.wait("vmi", "box", "have its claim back", TIMEOUT, taken_back).await?;
    let mut guest = console(s, "box").await?;
    Witness::goes_on(&mut guest, &witness).await?;
    written(&mut guest, records).await?;
    ensure!(sectors(&mut guest, 48).await? == 48 * 2048, "the disk has another size after a failed migration");
    guest.leave().await
}

/// Starts VM `box` with these claims, which move.
async fn start(s: &Story, claims: &[&str]) -> Result<()> {
    let manifest = with_claims(&vm("box", "Always"), claims);
    s.apply(&manifest.replace("  runStrategy:", "  updateVolumesStrategy: Migration\n  runStrategy:")).await?;
    s.wait_running("box").await.map(drop)
}

/// Names another claim in the template.
async fn name_claim(s: &Story, volume: &str, claim: &str) -> Result<()> {
    let volumes = json!([{"name": volume, "persistentVolumeClaim": {"claimName": claim}}]);
    let patch = Patch::Merge(json!({"spec": {"template": {"spec": {"volumes": volumes}}}}));
    s.api("vm").patch("box", &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Names another claim in the template and waits until the VMI can move there.
async fn begin_move(s: &Story, volume: &str, claim: &str) -> Result<()> {
    name_claim(s, volume, claim).await?;
    // virt-handler writes `LiveMigratable` after virt-controller has written `VolumesChange`.
    let changes = |vmi: &Value| ["VolumesChange", "LiveMigratable"].iter().all(|kind| is_true(vmi, kind));
    s.wait("vmi", "box", "have a change of volumes", TIMEOUT, changes).await.map(drop)
}

/// Moves a volume to another claim.
async fn move_to(s: &Story, volume: &str, claim: &str) -> Result<()> {
    begin_move(s, volume, claim).await?;
    migrate(s, "box").await?;
    let done = |vmi: &Value| {
        condition(vmi, "VolumesChange").is_none()
            && vmi["status"]["migratedVolumes"].as_array().is_none_or(Vec::is_empty)
            && vmi["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
    };
    s.wait("vmi", "box", "have the new claim", TIMEOUT, done).await?;
    let vm = s.get("vm", "box").await?;
    ensure!(condition(&vm, "RestartRequired").is_none(), "{}", vm["status"]["conditions"]);
    Ok(())
}

/// Writes a mark to the last sector of the disk and returns it.
async fn mark(guest: &mut Console) -> Result<String> {
    let write = "modprobe -qa virtio_blk; read -r n </sys/block/vda/size; \
                 echo kept-$((40+2)) | dd of=/dev/vda bs=512 seek=$((n-1)) conv=sync,fsync 2>/dev/null";
    run(guest, write).await?;
    Ok("kept-42".to_owned())
}

/// Reads the mark of a disk that had this number of sectors.
async fn read_mark(guest: &mut Console, sectors: u64) -> Result<String> {
    let last = sectors - 1;
    let read =
        format!("echo 1 >/proc/sys/vm/drop_caches; dd if=/dev/vda bs=512 skip={last} count=1 2>/dev/null | head -c 7");
    run(guest, &read).await
}

/// Waits until the disk has the size, and returns its number of sectors.
async fn sectors(guest: &mut Console, mebibytes: u32) -> Result<u64> {
    let wanted = u64::from(mebibytes) * 2048;
    let look = format!(
        "modprobe -qa virtio_blk; for i in $(seq 60); do read -r n </sys/block/vda/size; [ $n = {wanted} ] && break; sleep 1; done; \
         echo $n"
    );
    Ok(run(guest, &look).await?.parse()?)
}

/// Checks that a guest that writes to the first sector of its disk does so in its new claim alone.
async fn ensure_only_written(
    s: &Story,
    guest: &mut Console,
    records: u64,
    former: &Storage,
    latter: &Storage,
) -> Result<()> {
    let first = |storage: &Storage| {
        let directory = &storage.directory;
        format!(
            "for file in disk.img backing; do [ ! -e {directory}/$file ] || head -c 512 {directory}/$file | md5sum; done"
        )
    };
    let before = on_host(s, &former.node, &first(former)).await?;
    let other = on_host(s, &latter.node, &first(latter)).await?;
    ensure!(!before.is_empty() && !other.is_empty(), "a claim has no image");
    // A record that is written already may be older than these sums.
    let present = written(guest, records).await?;
    written(guest, present).await?;
    ensure!(on_host(s, &former.node, &first(former)).await? == before, "the former claim is still written");
    ensure!(on_host(s, &latter.node, &first(latter)).await? != other, "the new claim is not written");
    Ok(())
}

async fn moved(s: &Story, former: &Storage, latter: &Storage) -> Result<()> {
    for Storage { node, directory, .. } in [former, latter] {
        on_host(s, node, &format!("truncate -s 8M {directory}/disk.img && chown 107:107 {directory}/disk.img")).await?;
    }
    start(s, &["former"]).await?;
    let mut guest = console(s, "box").await?;
    let (kept, size) = (mark(&mut guest).await?, sectors(&mut guest, 15).await?);
    let witness = Witness::start(&mut guest).await?;
    write_alone(&mut guest, "/dev/vda").await?;
    let records = written(&mut guest, 0).await?;
    guest.leave().await?;

    move_to(s, "former", "latter").await?;
    let mut guest = console(s, "box").await?;
    Witness::goes_on(&mut guest, &witness).await?;
    let records = written(&mut guest, records).await?;
    ensure!(read_mark(&mut guest, size).await? == kept, "the disk has lost data");
    ensure_only_written(s, &mut guest, records, former, latter).await?;
    guest.leave().await
}
