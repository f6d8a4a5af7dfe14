//! Creation of many pods or VMs at a rate, and the time from the creation of each until it is Running.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use ferrovirt_e2e_tests::Story;
use futures::{StreamExt, TryStreamExt};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tokio::{
    sync::Semaphore,
    task::{AbortHandle, JoinSet},
};

use super::nodes::SIMULATED;
use crate::{Figures, percentile};

/// Concurrent creations.
const CREATIONS: usize = 64;
/// Instance type of the VMs.
const INSTANCE_TYPE: &str = "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineInstancetype
metadata: {name: small}
spec: {cpu: {guest: 1}, memory: {guest: 64Mi}}
";
/// Time limit for the last of all created objects to become Running.
const RUNNING_LIMIT: Duration = Duration::from_secs(600);
/// Time limit of the deletion of all objects.
const DELETION_LIMIT: Duration = Duration::from_secs(900);

/// Returns the UID of the created object that an object belongs to.
type Key = fn(&DynamicObject) -> Option<String>;

/// Instants at which objects became Running, by UID of the created object: later objects reuse names.
type Seen = Arc<Mutex<HashMap<String, Instant>>>;

fn lock(seen: &Seen) -> MutexGuard<'_, HashMap<String, Instant>> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Times of objects.
#[derive(Default)]
pub(super) struct Times {
    /// Creation to Running, seconds.
    seconds: Vec<f64>,
    /// First creation.
    first: Option<Instant>,
    /// Last time that an object became Running.
    last: Option<Instant>,
}

impl Times {
    /// Adds the times of later objects.
    pub(super) fn extend(&mut self, other: Self) {
        self.seconds.extend(other.seconds);
        self.first = self.first.or(other.first);
        self.last = other.last.or(self.last);
    }

    /// Adds median and 95th percentile under a prefix.
    pub(super) fn report(&self, prefix: &str, figures: &mut Figures) -> Result<()> {
        for percent in [50, 95] {
            let value = percentile(&self.seconds, percent).context("no object was created")?;
            figures.insert(format!("{prefix}_p{percent}_running_s"), value);
        }
        Ok(())
    }

    /// Returns the objects that became Running per second, from the first creation to the last of them.
    pub(super) fn rate(&self) -> Result<f64> {
        let (first, last) = self.first.zip(self.last).context("no object was created")?;
        Ok(self.seconds.len() as f64 / last.duration_since(first).as_secs_f64())
    }
}

/// Objects of one kind in the namespace of the benchmark.
pub(super) struct Load {
    api: Api<DynamicObject>,
    /// API of the objects that run.
    running: Api<DynamicObject>,
    prefix: &'static str,
    spec: Value,
    types: Value,
    seen: Seen,
    watch: AbortHandle,
}

impl Load {
    /// Returns a load of bare pods like the launcher's: one container, restricted pod security.
    pub(super) fn pods(story: &Story) -> Self {
        let spec = json!({
            "nodeSelector": {SIMULATED: "true"},
            "tolerations": [{"key": SIMULATED, "operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "a", "image": "ferrovirt.io/toolbox:devel",
                "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}],
        });
        let own = |pod: &DynamicObject| pod.uid();
        Self::of(story.api("Pod"), (story.api("Pod"), own as Key), "pod", "v1", "Pod", spec)
    }

    /// Returns a load of VMs as users have them: with an instance type, two disks and one interface. A VM runs when its VMI does.
    pub(super) async fn vms(story: &Story) -> Result<Self> {
        story.apply(INSTANCE_TYPE).await?;
        let spec = json!({
            "runStrategy": "Always",
            "instancetype": {"kind": "VirtualMachineInstancetype", "name": "small"},
            "template": {"spec": {
                "nodeSelector": {SIMULATED: "true"},
                "tolerations": [{"key": SIMULATED, "operator": "Exists"}],
                "terminationGracePeriodSeconds": 0,
                "domain": {"devices": {
                    "disks": [{"name": "root", "disk": {"bus": "virtio"}}, {"name": "seed", "disk": {"bus": "virtio"}}],
                    "interfaces": [{"name": "default", "masquerade": {}}],
                }},
                "networks": [{"name": "default", "pod": {}}],
                "volumes": [
                    {"name": "root", "containerDisk": {"image": "ferrovirt.io/guests/tiny:devel"}},
                    {"name": "seed", "cloudInitNoCloud": {"userData": "#cloud-config\n"}},
                ],
            }},
        });
        let owner = |vmi: &DynamicObject| {
            let owner = vmi.owner_references().iter().find(|owner| owner.controller == Some(true));
            owner.map(|owner| owner.uid.clone())
        };
        let running = (story.api("vmi"), owner as Key);
        Ok(Self::of(story.api("vm"), running, "vm", "kubevirt.io/v1", "VirtualMachine", spec))
    }

    /// `running`: the API of the objects that run, and the UID of the created object of each.
    fn of(
        api: Api<DynamicObject>,
        running: (Api<DynamicObject>, Key),
        prefix: &'static str,
        version: &str,
        kind: &str,
        spec: Value,
    ) -> Self {
        let seen = Seen::default();
        let (running, key) = running;
        let watch = tokio::spawn(follow(running.clone(), key, seen.clone())).abort_handle();
        Self { api, running, prefix, spec, types: json!({"apiVersion": version, "kind": kind}), seen, watch }
    }

    /// Creates objects with these numbers at a rate per second and waits until all are Running.
    pub(super) async fn create(&self, numbers: Range<usize>, rate: f64) -> Result<Times> {
        let permits = Arc::new(Semaphore::new(CREATIONS));
        let first = Instant::now();
        let mut creations = JoinSet::new();
        let count = numbers.len();
        for (position, number) in numbers.enumerate() {
            // A creation that is held up by earlier ones counts from the time at which it was due.
            let due = first + Duration::from_secs_f64(position as f64 / rate);
            tokio::time::sleep_until(due.into()).await;
            let permit = permits.clone().acquire_owned().await?;
            let name = format!("{}-{number}", self.prefix);
            let mut object = self.types.clone();
            object["metadata"] = json!({"name": name});
            object["spec"] = self.spec.clone();
            let (api, object) = (self.api.clone(), serde_json::from_value::<DynamicObject>(object)?);
            creations.spawn(async move {
                let result = api.create(&PostParams::default(), &object).await;
                drop(permit);
                result.map(|stored| (stored.uid().unwrap_or_default(), due))
            });
        }
        let mut created = HashMap::new();
        while let Some(result) = creations.join_next().await {
            let (uid, instant) = result?.context("cannot create an object")?;
            created.insert(uid, instant);
        }
        let deadline = Instant::now() + RUNNING_LIMIT;
        loop {
            let seen = lock(&self.seen).clone();
            let times: Vec<(Instant, Instant)> =
                created.iter().filter_map(|(uid, created)| Some((*created, *seen.get(uid)?))).collect();
            if times.len() == count {
                return Ok(Times {
                    seconds: times.iter().map(|(from, to)| to.duration_since(*from).as_secs_f64()).collect(),
                    first: Some(first),
                    last: times.iter().map(|(_, to)| *to).max(),
                });
            }
            if Instant::now() > deadline {
                bail!("{} of {count} objects are Running after {RUNNING_LIMIT:?}", times.len());
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Deletes all objects and waits until none exists, and none of those that ran.
    pub(super) async fn delete(&self) -> Result<()> {
        let parameters = DeleteParams {
            propagation_policy: Some(kube::api::PropagationPolicy::Background),
            ..DeleteParams::default()
        };
        let deadline = Instant::now() + DELETION_LIMIT;
        loop {
            // The API server closes the connection of a request that takes a minute; the next one deletes the rest.
            if let Err(error) = self.api.delete_collection(&parameters, &ListParams::default()).await {
                eprintln!("deletion of {}s: {error}", self.prefix);
            }
            let one = ListParams::default().limit(1);
            let created = self.api.list_metadata(&one).await?;
            if created.items.is_empty() && self.running.list_metadata(&one).await?.items.is_empty() {
                lock(&self.seen).clear();
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{}s still exist after {DELETION_LIMIT:?}", self.prefix);
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

/// Records the first time that each object is Running.
async fn follow(api: Api<DynamicObject>, key: Key, seen: Seen) {
    let mut events = daemon::watch::events(api, watcher::Config::default()).applied_objects().boxed();
    loop {
        match events.try_next().await {
            Ok(Some(object)) => {
                if object.data["status"]["phase"] == "Running"
                    && let Some(uid) = key(&object)
                {
                    lock(&seen).entry(uid).or_insert_with(Instant::now);
                }
            }
            Ok(None) => return,
            Err(error) => eprintln!("watch: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_of_all_objects() {
        let mut times = Times::default();
        let first = Instant::now();
        for n in 1..=100_u32 {
            let last = first + Duration::from_secs(n.into());
            times.extend(Times { seconds: vec![n.into()], first: Some(first), last: Some(last) });
        }
        let mut figures = Figures::new();
        times.report("x", &mut figures).unwrap();
        assert_eq!((figures["x_p50_running_s"], figures["x_p95_running_s"]), (50.0, 95.0));
        assert_eq!(times.rate().unwrap(), 1.0);
        assert!(Times::default().report("y", &mut figures).is_err());
        assert!(Times::default().rate().is_err());
    }
}
