//! The end of virt-handler while migrations are in progress.

use tokio::task::JoinHandle;

use super::*;

fn drain(node: &Node) -> JoinHandle<()> {
    let channels = node.channels.clone();
    tokio::spawn(async move { channels.drain().await })
}

/// Opens a channel and passes a byte through it.
async fn open(leaves: &mut Launcher, arrives: &mut Launcher, channel: Channel) -> (UnixStream, UnixStream) {
    let mut near = leaves.open(channel).await;
    let mut far = arrives.connect(channel).await;
    near.write_all(b"x").await.unwrap();
    assert_eq!(soon(far.read_u8()).await.unwrap(), b'x');
    (near, far)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrations_in_progress_end_before_their_virt_handlers_and_no_other_begins() {
    let authority = Authority::new();
    let Moving { source_end, target_end, mut leaves, mut arrives, source, target } = Moving::start(&authority);
    let _control = open(&mut leaves, &mut arrives, Channel::Control).await;
    let (source_drain, target_drain) = (drain(&source), drain(&target));
    let begun = || [&source, &target].iter().all(|node| node.channels.draining().is_cancelled());
    eventually("both wait", begun).await;
    // The memory of the same migration.
    let _memory = open(&mut leaves, &mut arrives, Channel::Memory).await;
    // Another one.
    let other = Node::start(&authority, SOURCE);
    let (mut others, others_socket) = Launcher::new();
    let (late, late_socket) = Launcher::new();
    let late_end = target.channels.receive(migration("w", "n"), SOURCE.into(), late_socket);
    let other_end = other.channels.send(migration("w", "n"), target.as_target(TARGET), others_socket);
    let mut refused = others.open(Channel::Control).await;
    closed(&mut refused).await;
    target.refused(Refusal::Stopping).await;
    assert_eq!(late.opened(), 0);
    assert!(!source_drain.is_finished() && !target_drain.is_finished());
    drop(source_end);
    soon(source_drain).await.unwrap();
    assert!(!target_drain.is_finished(), "its end of the migration is open");
    drop(target_end);
    soon(target_drain).await.unwrap();
    drop((late_end, other_end));
    source.nothing_left().await;
    target.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_awaited_without_a_migration_in_progress() {
    let node = Node::start(&Authority::new(), TARGET);
    soon(node.channels.drain()).await;
    let node = Node::start(&Authority::new(), TARGET);
    let (_arrives, socket) = Launcher::new();
    // It has not begun.
    let _target_end = node.channels.receive(migration("v", "m"), SOURCE.into(), socket);
    soon(node.channels.drain()).await;
}
