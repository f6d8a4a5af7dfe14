//! The work on one shard: it begins when it is the turn of this replica, and ends when it is that of another one.
//!
//! ```text
//!  follow ──free or expired, and its turn──> held: caches as new as the lease, work
//!    ^                                         │ another replica should hold it     │ stop          │ lost
//!    └──lease released <── work has ended <────┘                                    v               v
//!                                                                               released     the process ends
//! ```
//! `shards.rs` decides which replica should hold which shard. The lease of the first one is that of the leader, which is not handed over.

use std::{sync::Arc, time::Duration};

use daemon::CancellationToken;
use tokio::time::{Instant, sleep};

use crate::{
    lead::Work,
    replicas::Replicas,
    runtime::{Election, Leadership, Run},
    shards::{hands_over, may_take},
};

/// Interval at which a replica looks if another one should hold its shard.
const LOOK: Duration = Duration::from_secs(1);
/// Longest wait for the end of the work on a shard. No write lasts as long; a list or a freeze of a guest may.
const END: Duration = Duration::from_secs(10);
/// Interval at which the end of the work is looked for.
const RECHECK: Duration = Duration::from_millis(20);

/// Works on a shard whenever it is the turn of this replica, until `stop` (true) or until its lease is lost (false).
pub(crate) async fn hold(
    shard: u32,
    election: &mut Election,
    replicas: &Replicas,
    work: &Work,
    stop: &CancellationToken,
) -> bool {
    let controllers = work.sharded();
    let permits = |former: &str, over: Duration| may_take(shard, &replicas.live(), replicas.own(), former, over);
    loop {
        if !election.win_if(stop, &permits).await {
            return true;
        }
        tracing::info!(shard, "holding a shard");
        let (leadership, since) = (election.leadership(), Instant::now());
        let leave = async {
            while !hands_over(shard, &replicas.live(), replicas.own(), since.elapsed()) {
                sleep(LOOK).await;
            }
            tracing::info!(shard, "handing a shard over");
            end(shard, &controllers, &leadership).await;
        };
        // Renewals go on until the work has ended.
        let kept = tokio::select! {
            kept = election.keep(stop) => kept,
            () = work.lead(shard, leadership.clone()) => true,
            () = leave => true,
        };
        controllers.iter().for_each(|controller| controller.stop(shard));
        if !kept {
            return false;
        }
        election.release().await;
        if stop.is_cancelled() {
            return true;
        }
    }
}

/// Ends the work on a shard, for which no further write begins.
async fn end(shard: u32, controllers: &[Arc<dyn Run>], leadership: &Leadership) {
    leadership.end();
    controllers.iter().for_each(|controller| controller.stop(shard));
    let until = Instant::now() + END;
    while Instant::now() < until && !controllers.iter().all(|controller| controller.is_idle(shard)) {
        sleep(RECHECK).await;
    }
}
