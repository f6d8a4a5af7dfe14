//! Which change wakes which controller, and what each controller is shown.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

use api::{
    VirtualMachine, VirtualMachineInstance, VmiPhase,
    constants::{component, condition},
    instancetype::{
        MatchedKind,
        matcher::{Role, Source},
    },
    owner, tls,
    tsc::{self, Need},
    vsock,
};
use jiff::Timestamp;
use kube::{
    Client, ResourceExt,
    core::{Selector, SelectorExt},
};
use process::config::ConfigHandle;

use crate::{
    certificates::{self, Authority, Lives},
    kubevirt, launcher_pod,
    launcher_pod::NamespaceLimits,
    node,
    options::Options,
    replicaset,
    runtime::{
        Cached, Decision, Failure, Key, Kind, driver::Driver, executor::Executor, metrics::Metrics, queue::Queue,
    },
    views::{CaBundleView, ClaimView},
    vm, vmi, webhook_path, workloads,
    world::World,
};

/// Label of namespaces: memory limit over request.
const MEMORY_LIMIT_RATIO: &str = "alpha.kubevirt.io/auto-memory-limits-ratio";

/// Gate under which others add what networks need of a node to pods.
const EXTERNAL_RESOURCES: &str = "ExternalNetResourceInjection";

/// Version of this installation.
const VERSION: &str = concat!("v", env!("CARGO_PKG_VERSION"));

type Keys = Arc<Queue<Key>>;

/// All controllers with their queues.
pub struct Controllers {
    world: Arc<World>,
    executor: Arc<Executor>,
    config: ConfigHandle,
    metrics: Metrics,
    namespace: String,
    launcher_image: String,
    guestfs_image: String,
    manages_roles: bool,
    vms: Keys,
    instances: Keys,
    replica_sets: Keys,
    nodes: Keys,
    certificates: Keys,
    webhook_paths: Keys,
    requests: Keys,
    kubevirts: Keys,
}

impl Controllers {
    /// Controllers that work on `world` through `executor`.
    #[must_use]
    pub fn new(
        world: Arc<World>,
        executor: Arc<Executor>,
        config: ConfigHandle,
        metrics: Metrics,
        options: &Options,
    ) -> Self {
        Self {
            world,
            executor,
            config,
            metrics,
            namespace: options.namespace.clone(),
            launcher_image: options.launcher_image.clone(),
            guestfs_image: options.guestfs_image.clone(),
            manages_roles: options.manage_role_aggregation,
            vms: Arc::default(),
            instances: Arc::default(),
            replica_sets: Arc::default(),
            nodes: Arc::default(),
            certificates: Arc::default(),
            webhook_paths: Arc::default(),
            requests: Arc::default(),
            kubevirts: Arc::default(),
        }
    }

    /// Fills the caches, then starts the controllers. Certificates come first: everything else waits for them.
    pub async fn start(mut self, client: Client) {
        self.listen_installation();
        self.listen_machines();
        self.listen_definitions();
        self.listen_instancetypes();
        self.listen_nodes();
        self.world.follow(&client, &self.namespace);
        tokio::spawn(follow_definitions(self.world.clone(), self.config.clone(), client));

        self.world.certificates_synced().await;
        self.start_certificates();
        self.world.synced().await;
        // Pods are made once: not by the defaults that hold until the configuration has been read.
        self.config.read_once().await;
        tracing::info!(
            vms = self.world.vms.len(),
            machines = self.world.instances.len(),
            pods = self.world.pods.len(),
            "caches are filled"
        );
        self.start_machines();
        self.start_installation();
        self.follow_config().await;
    }

    fn listen_machines(&self) {
        let queue = self.vms.clone();
        self.world.vms.listen(move |(former, present)| {
            queue.extend(former.or(present).map(|vm| Key::of(&vm.metadata)));
        });
        let queue = self.replica_sets.clone();
        self.world.replica_sets.listen(move |(former, present)| {
            queue.extend(former.or(present).map(|set| Key::of(&set.metadata)));
        });
        let (vms, instances, sets, nodes) =
            (self.vms.clone(), self.instances.clone(), self.replica_sets.clone(), self.nodes.clone());
        let (known_sets, metrics, installation) =
            (self.world.replica_sets.clone(), self.metrics.clone(), self.kubevirts.clone());
        let installation_key = Key::new(self.namespace.clone(), "");
        self.world.instances.listen(move |(former, present)| {
            let Some(instance) = present.or(former) else { return };
            let key = Key::of(&instance.metadata);
            instances.add(key.clone());
            vms.add(key.clone());
            // A machine that is not controlled by another object may belong to any set of its namespace.
            if owner::controller_of_kind::<VirtualMachine>(&instance.metadata).is_none() {
                sets.extend(known_sets.keys().into_iter().filter(|set| set.namespace == key.namespace));
            }
            if let Some(name) = instance.status.as_ref().and_then(|status| status.node_name.clone()) {
                nodes.add(Key::new("", name));
            }
            let outdated = |instance: &VirtualMachineInstance| {
                instance.labels().contains_key(api::constants::label::OUTDATED_LAUNCHER_IMAGE)
            };
            if former.is_some_and(outdated) != present.is_some_and(outdated) {
                installation.add(installation_key.clone());
            }
            if let (Some(former), Some(present)) = (former, present) {
                metrics.phase_changed(former, present, Timestamp::now());
            }
        });
        let instances = self.instances.clone();
        self.world.pods.listen(move |(former, present)| {
            let Some(pod) = present.or(former) else { return };
            if let Some(owner) = owner::controller_of_kind::<VirtualMachineInstance>(&pod.metadata) {
                instances.add(Key::new(pod.metadata.namespace.clone().unwrap_or_default(), owner.name.clone()));
            }
        });
        let (vms, instances) = (self.vms.clone(), self.instances.clone());
        let (known_vms, known_instances) = (self.world.vms.clone(), self.world.instances.clone());
        self.world.claims.listen(move |(former, present)| {
            if matches!((former, present), (Some(former), Some(present)) if former.tells_the_same(present)) {
                return;
            }
            let Some(claim) = present.or(former) else { return };
            let (namespace, name) =
                (claim.metadata.namespace.as_deref(), claim.metadata.name.clone().unwrap_or_default());
            // Those that wait for it, and those that run and hear of its growth.
            let concerned = known_instances.filter(|instance| {
                instance.metadata.namespace.as_deref() == namespace
                    && !instance.is_final()
                    && launcher_pod::claim_names(instance).contains(&name)
            });
            instances.extend(concerned.iter().map(|instance| Key::of(&instance.metadata)));
            let naming = known_vms
                .filter(|vm| vm.metadata.namespace.as_deref() == namespace && vm::claim_names(vm).contains(&name));
            vms.extend(naming.iter().map(|vm| Key::of(&vm.metadata)));
        });
    }

    /// A network that a machine waits for may be there at last.
    fn listen_definitions(&self) {
        let (queue, known_instances) = (self.instances.clone(), self.world.instances.clone());
        self.world.definitions.listen(move |(_, present)| {
            let Some(definition) = present else { return };
            let place = definition.metadata.namespace.as_deref().zip(definition.metadata.name.as_deref());
            let waiting = known_instances.filter(|instance| {
                is_unstarted(instance) && launcher_pod::definition_names(instance).any(|wanted| Some(wanted) == place)
            });
            queue.extend(waiting.iter().map(|instance| Key::of(&instance.metadata)));
        });
    }

    /// What a VM names may be there at last, or again.
    fn listen_instancetypes(&self) {
        for kind in MatchedKind::ALL {
            let (queue, known_vms) = (self.vms.clone(), self.world.vms.clone());
            self.world.matched(kind).listen(move |(_, present)| {
                let Some(object) = present else { return };
                let wanted = Source::Object(kind, object.metadata.name.clone().unwrap_or_default());
                let naming = known_vms.filter(|vm| {
                    (kind.is_cluster_wide() || vm.metadata.namespace == object.metadata.namespace)
                        && vm::instancetype::names(vm, &wanted)
                });
                queue.extend(naming.iter().map(|vm| Key::of(&vm.metadata)));
            });
        }
        let (queue, known_vms) = (self.vms.clone(), self.world.vms.clone());
        self.world.revisions.listen(move |(_, present)| {
            let Some(revision) = present else { return };
            let wanted = Source::Revision(revision.metadata.name.clone().unwrap_or_default());
            // Most copies are their VM's own; one that a user names may be anybody's.
            match owner::controller_of_kind::<VirtualMachine>(&revision.metadata) {
                Some(owner) => {
                    queue.add(Key::new(revision.metadata.namespace.clone().unwrap_or_default(), owner.name.clone()));
                }
                None => {
                    let naming = known_vms.filter(|vm| {
                        vm.metadata.namespace == revision.metadata.namespace && vm::instancetype::names(vm, &wanted)
                    });
                    queue.extend(naming.iter().map(|vm| Key::of(&vm.metadata)));
                }
            }
        });
    }

    fn listen_nodes(&self) {
        let (queue, instances) = (self.nodes.clone(), self.instances.clone());
        let (known, known_instances) = (self.world.nodes.clone(), self.world.instances.clone());
        self.world.nodes.listen(move |(former, present)| {
            queue.extend(present.or(former).map(|node| Key::of(&node.metadata)));
            // The lowest frequency of all nodes may be another one now, and machines may wait for any.
            if former.and_then(crate::tsc::standing) != present.and_then(crate::tsc::standing) {
                queue.extend(known.keys());
                let waiting = known_instances.filter(wanting_frequency);
                instances.extend(waiting.iter().map(|instance| Key::of(&instance.metadata)));
            }
        });
        let (queue, known) = (self.nodes.clone(), self.world.nodes.clone());
        self.world.instances.listen(move |(former, present)| {
            let used = |instance: Option<&VirtualMachineInstance>| {
                instance.filter(|instance| !instance.is_final()).and_then(tsc::frequency)
            };
            if used(former) != used(present) {
                queue.extend(known.keys());
            }
        });
        let queue = self.nodes.clone();
        self.world.handlers.listen(move |(former, present)| {
            let name = present.or(former).and_then(|pod| pod.node_name.clone());
            queue.extend(name.map(|name| Key::new("", name)));
        });
    }

    fn listen_installation(&self) {
        // One decision covers all certificates, one the paths of all webhooks, and one the object of the installation.
        let one = Key::new(self.namespace.clone(), "");
        macro_rules! wake {
            ($cache:expr, $($queue:expr),+) => {{
                let (queues, key) = ([$($queue.clone()),+], one.clone());
                $cache.listen(move |_| queues.iter().for_each(|queue| queue.add(key.clone())));
            }};
        }
        wake!(self.world.secrets, self.certificates, self.webhook_paths, self.kubevirts);
        wake!(self.world.config_maps, self.certificates, self.kubevirts);
        wake!(self.world.kubevirts, self.certificates, self.kubevirts);
        wake!(self.world.api_services, self.certificates, self.kubevirts);
        wake!(self.world.mutating_webhooks, self.certificates, self.webhook_paths, self.kubevirts);
        wake!(self.world.validating_webhooks, self.certificates, self.webhook_paths, self.kubevirts);
        wake!(self.world.deployments, self.webhook_paths, self.kubevirts);
        wake!(self.world.daemon_sets, self.kubevirts);
        wake!(self.world.roles, self.kubevirts);
        let queue = self.requests.clone();
        self.world.requests.listen(move |(_, present)| {
            queue.extend(present.map(|request| Key::of(&request.metadata)));
        });
        let (queue, requests, known) = (self.certificates.clone(), self.requests.clone(), self.world.requests.clone());
        self.webhook_paths.add(one.clone());
        queue.add(one);
        // A new authority may be what requests have waited for.
        self.world.secrets.listen(move |_| requests.extend(known.keys()));
    }

    fn start_certificates(&self) {
        let (world, namespace) = (self.world.clone(), self.namespace.clone());
        let reconcile = move |_: &Key, _: Option<&Failure>, now| certificates_decision(&world, &namespace, now);
        Driver::new("certificates", self.certificates.clone(), self.executor.clone(), reconcile).start(1);

        let (world, namespace) = (self.world.clone(), self.namespace.clone());
        let reconcile = move |key: &Key, _: Option<&Failure>, now| request_decision(&world, &namespace, key, now);
        Driver::new("requests", self.requests.clone(), self.executor.clone(), reconcile).start(1);
    }

    fn start_machines(&self) {
        let (world, config) = (self.world.clone(), self.config.clone());
        let reconcile =
            move |key: &Key, failure: Option<&Failure>, now| vm_decision(&world, &config, key, failure, now);
        let driver = Driver::new("vm", self.vms.clone(), self.executor.clone(), reconcile);
        let forgetful = driver.clone();
        self.world.vms.listen(move |seen| forget_deleted(&forgetful, seen));
        driver.start(3);

        let (world, config, image) = (self.world.clone(), self.config.clone(), self.launcher_image.clone());
        let reconcile = move |key: &Key, failure: Option<&Failure>, now| {
            instance_decision(&world, &config, &image, key, failure, now)
        };
        let driver = Driver::new("vmi", self.instances.clone(), self.executor.clone(), reconcile);
        let forgetful = driver.clone();
        self.world.instances.listen(move |seen| forget_deleted(&forgetful, seen));
        driver.start(10);

        let world = self.world.clone();
        let reconcile = move |key: &Key, failure: Option<&Failure>, now| set_decision(&world, key, failure, now);
        let driver = Driver::new("replicaset", self.replica_sets.clone(), self.executor.clone(), reconcile);
        let forgetful = driver.clone();
        self.world.replica_sets.listen(move |seen| forget_deleted(&forgetful, seen));
        driver.start(3);

        let (world, config) = (self.world.clone(), self.config.clone());
        let reconcile = move |key: &Key, _: Option<&Failure>, now| node_decision(&world, &config, key, now);
        Driver::new("node", self.nodes.clone(), self.executor.clone(), reconcile).start(1);
    }

    fn start_installation(&self) {
        let (world, namespace, since) = (self.world.clone(), self.namespace.clone(), Timestamp::now());
        let reconcile = move |_: &Key, _: Option<&Failure>, now| webhook_paths_decision(&world, &namespace, since, now);
        Driver::new("webhook-path", self.webhook_paths.clone(), self.executor.clone(), reconcile).start(1);

        let (world, namespace) = (self.world.clone(), self.namespace.clone());
        let deployment = kubevirt::Deployment::new(&namespace, &self.launcher_image, &self.guestfs_image, VERSION);
        let batches = workloads::Batches::default();
        let manages_roles = self.manages_roles;
        let reconcile =
            move |_: &Key, _: Option<&Failure>, now| {
                let decision = installation_decision(&world, &namespace, &deployment, manages_roles, now);
                // What is written wakes this again.
                decision.map(|decision| {
                    if decision.effects.is_empty() { eviction_decision(&world, &batches, now) } else { decision }
                })
            };
        Driver::new("kubevirt", self.kubevirts.clone(), self.executor.clone(), reconcile).start(1);
    }

    /// A changed configuration may let machines start that could not.
    async fn follow_config(mut self) {
        let mut policy = self.config.current().reference_policy;
        let mut rollout = self.config.current().vm_rollout_strategy;
        let mut skip_hooks = self.config.current().skip_backup_hooks;
        loop {
            self.config.changed().await;
            // Another policy is for the VMs there are, too.
            let former = std::mem::replace(&mut policy, self.config.current().reference_policy);
            if former != policy {
                let naming = self.world.vms.filter(|vm| vm.spec.instancetype.is_some() || vm.spec.preference.is_some());
                self.vms.extend(naming.iter().map(|vm| Key::of(&vm.metadata)));
            }
            // With another rollout strategy other VMs wait for a restart, and what failed may not fail any more.
            let former = std::mem::replace(&mut rollout, self.config.current().vm_rollout_strategy);
            let other = former != rollout;
            let concerned = self.world.vms.filter(|vm| other || vm.condition(condition::FAILURE).is_some());
            self.vms.extend(concerned.iter().map(|vm| Key::of(&vm.metadata)));
            // Annotations for backups are kept on the pods there are.
            let former = std::mem::replace(&mut skip_hooks, self.config.current().skip_backup_hooks);
            let all = former != skip_hooks;
            let concerned = self.world.instances.filter(|instance| all || is_unstarted(instance));
            self.instances.extend(concerned.iter().map(|instance| Key::of(&instance.metadata)));
        }
    }
}

/// Follows the definitions of networks once somebody has to ask for what they need of a node.
async fn follow_definitions(world: Arc<World>, mut config: ConfigHandle, client: Client) {
    config.read_once().await;
    while config.current().enabled(EXTERNAL_RESOURCES) {
        config.changed().await;
    }
    world.follow_definitions(client).await;
}

fn is_unstarted(instance: &VirtualMachineInstance) -> bool {
    matches!(instance.phase(), VmiPhase::Unset | VmiPhase::Pending)
}

fn forget_deleted<K: Cached>(driver: &Driver, (former, present): (Option<&K>, Option<&K>)) {
    let successor = |former: &K, present: &K| former.meta().uid != present.meta().uid;
    match (former, present) {
        (Some(former), None) => driver.forget(&Key::of(former.meta())),
        (Some(former), Some(present)) if successor(former, present) => driver.forget(&Key::of(present.meta())),
        _ => {}
    }
}

fn vm_decision(
    world: &World,
    config: &ConfigHandle,
    key: &Key,
    failure: Option<&Failure>,
    now: Timestamp,
) -> Result<Decision, serde_json::Error> {
    let Some(vm) = world.vms.get(key) else { return Ok(Decision::settled()) };
    let instance = world.instances.get(key);
    let claims = claims_of(world, &key.namespace, vm::claim_names(&vm));
    let look_up = |role: Role| {
        let revision = |name: &str| world.revisions.get(&Key::new(key.namespace.clone(), name));
        let object = |kind: MatchedKind, name: &str| {
            let namespace = if kind.is_cluster_wide() { "" } else { key.namespace.as_str() };
            world.matched(kind).get(&Key::new(namespace, name))
        };
        vm::instancetype::look_up(&vm, role, revision, object)
    };
    vm::decide(&vm::Observed {
        vm: &vm,
        instance: instance.as_deref(),
        claims: &claims,
        instancetype: look_up(Role::Instancetype),
        preference: look_up(Role::Preference),
        starts: &vm.metadata.uid.as_deref().map(|uid| world.starts.owned_by(uid)).unwrap_or_default(),
        config: &config.current(),
        failure,
        now,
    })
}

/// The claims of a namespace by name; those missing do not exist.
fn claims_of(world: &World, namespace: &str, names: Vec<String>) -> BTreeMap<String, Arc<ClaimView>> {
    let known = |name: String| {
        let claim = world.claims.get(&Key::new(namespace, name.clone()))?;
        Some((name, claim))
    };
    names.into_iter().filter_map(known).collect()
}

fn instance_decision(
    world: &World,
    config: &ConfigHandle,
    launcher_image: &str,
    key: &Key,
    failure: Option<&Failure>,
    now: Timestamp,
) -> Result<Decision, serde_json::Error> {
    let Some(instance) = world.instances.get(key) else { return Ok(Decision::settled()) };
    let config = config.current();
    let claims = claims_of(world, &key.namespace, launcher_pod::claim_names(&instance));
    let definitions = (!config.enabled(EXTERNAL_RESOURCES)).then(|| {
        let known = |(namespace, name): (&str, &str)| {
            Some((format!("{namespace}/{name}"), world.definitions.get(&Key::new(namespace, name))?))
        };
        launcher_pod::definition_names(&instance).filter_map(known).collect::<BTreeMap<_, _>>()
    });
    vmi::decide(&vmi::Observed {
        instance: &instance,
        pods: &world.pods_of(&instance),
        missing: &world.missing_pods(&instance),
        config: &config,
        launcher_image,
        claims: &claims,
        limits: namespace_limits(world, &config, &key.namespace),
        frequency: wanting_frequency(&instance).then(|| frequency(world, &config)).flatten(),
        cid: wanting_cid(&instance).then(|| cid(world, &instance)).flatten(),
        definitions: definitions.as_ref(),
        failure,
        now,
    })
}

/// True when the machine has yet to get a frequency for its counter.
fn wanting_frequency(instance: &VirtualMachineInstance) -> bool {
    is_unstarted(instance) && tsc::need(instance) != Need::Nothing && tsc::frequency(instance).is_none()
}

/// True when the machine needs a context id before it starts.
fn wanting_cid(instance: &VirtualMachineInstance) -> bool {
    is_unstarted(instance) && vsock::is_attached(instance)
}

/// The context id that a machine keeps or gets.
fn cid(world: &World, instance: &VirtualMachineInstance) -> Option<u32> {
    let uid = instance.metadata.uid.as_deref();
    let others = world
        .instances
        .filter(|other| vsock::cid(other).is_some() && !other.is_final() && other.metadata.uid.as_deref() != uid);
    let taken: HashSet<u32> = others.iter().filter_map(|other| vsock::cid(other)).collect();
    crate::vsock::chosen(vsock::cid(instance), &taken, crate::vsock::draws())
}

/// The frequency that a machine gets which depends on it.
fn frequency(world: &World, config: &api::config::ClusterConfig) -> Option<i64> {
    let named = world.instances.filter(|instance| !instance.is_final());
    let occupied: HashSet<&str> =
        named.iter().filter_map(|instance| instance.status.as_ref()?.node_name.as_deref()).collect();
    let minimum = config.minimum_cluster_tsc_frequency;
    crate::tsc::chosen(&world.nodes.filter(|_| true), minimum, |node| occupied.contains(node))
}

/// All frequencies that nodes are to be labelled with where they offer them.
fn frequencies(world: &World, config: &api::config::ClusterConfig) -> BTreeSet<u64> {
    let running = world.instances.filter(|instance| !instance.is_final() && tsc::frequency(instance).is_some());
    let used = running.iter().filter_map(|instance| tsc::frequency(instance));
    used.chain(frequency(world, config)).filter_map(|frequency| u64::try_from(frequency).ok()).collect()
}

fn namespace_limits(world: &World, config: &api::config::ClusterConfig, namespace: &str) -> NamespaceLimits {
    let quotas = world.quotas.owned_by(namespace);
    let known = world.namespaces.get(&Key::new("", namespace));
    let labels = known.as_ref().map(|namespace| &namespace.labels);
    let selected = config.auto_cpu_limit_namespaces.clone().and_then(|selector| Selector::try_from(selector).ok());
    NamespaceLimits {
        memory: quotas.iter().any(|quota| quota.memory_limits),
        cpu: quotas.iter().any(|quota| quota.cpu_limits)
            || selected.zip(labels).is_some_and(|(selector, labels)| selector.matches(labels)),
        memory_ratio: labels
            .and_then(|labels| labels.get(MEMORY_LIMIT_RATIO)?.parse::<f64>().ok())
            .filter(|ratio| ratio.is_finite()),
    }
}

fn set_decision(
    world: &World,
    key: &Key,
    failure: Option<&Failure>,
    now: Timestamp,
) -> Result<Decision, serde_json::Error> {
    let Some(set) = world.replica_sets.get(key) else { return Ok(Decision::settled()) };
    let instances =
        world.instances.filter(|instance| instance.metadata.namespace.as_deref() == Some(key.namespace.as_str()));
    replicaset::decide(&replicaset::Observed { set: &set, instances: &instances, failure, now })
}

fn node_decision(
    world: &World,
    config: &ConfigHandle,
    key: &Key,
    now: Timestamp,
) -> Result<Decision, serde_json::Error> {
    let node = world.nodes.get(key);
    let concerned = node.as_ref().is_some_and(|node| crate::tsc::concerns(node));
    let frequencies = if concerned { frequencies(world, &config.current()) } else { BTreeSet::new() };
    let on_node = world.instances.filter(|instance| {
        instance.status.as_ref().and_then(|status| status.node_name.as_deref()) == Some(key.name.as_str())
    });
    // A VMI is given up only if it has no pod, and of one with missing pods that is not known yet.
    let machines: Vec<node::Machine> = on_node
        .into_iter()
        .filter(|instance| world.missing_pods(instance).is_empty())
        .map(|instance| {
            let pods = world.pods_of(&instance);
            node::Machine { instance, pods }
        })
        .collect();
    let handlers = world.handlers.filter(|pod| pod.node_name.as_deref() == Some(key.name.as_str()) && !pod.is_down());
    let set = world.daemon_sets.filter(|set| set.metadata.name.as_deref() == Some(component::VIRT_HANDLER));
    node::decide(&node::Observed {
        key,
        node: node.as_deref(),
        machines: &machines,
        has_handler: !handlers.is_empty(),
        daemon_set: set.first().map(Arc::as_ref),
        frequencies: &frequencies,
        now,
    })
}

fn lives(world: &World) -> Lives {
    let kubevirt = world.kubevirts.filter(|object| object.metadata.deletion_timestamp.is_none());
    kubevirt
        .first()
        .map_or_else(Lives::default, |object| Lives::from_strategy(&object.spec.certificate_rotate_strategy))
}

fn bundle(world: &World, namespace: &str) -> Option<String> {
    let map = world.config_maps.get(&Key::new(namespace, tls::CA_CONFIG_MAP))?;
    map.data.as_ref()?.get(tls::CA_BUNDLE_KEY).cloned()
}

fn carriers(world: &World) -> Vec<(Kind, Arc<CaBundleView>)> {
    let services = world.api_services.filter(|_| true);
    services.into_iter().map(|object| (Kind::ApiService, object)).chain(webhooks(world)).collect()
}

fn webhooks(world: &World) -> Vec<webhook_path::Configuration> {
    let all = |kind: Kind, objects: Vec<Arc<CaBundleView>>| objects.into_iter().map(move |object| (kind, object));
    all(Kind::MutatingWebhooks, world.mutating_webhooks.filter(|_| true))
        .chain(all(Kind::ValidatingWebhooks, world.validating_webhooks.filter(|_| true)))
        .collect()
}

fn webhook_paths_decision(
    world: &World,
    namespace: &str,
    since: Timestamp,
    now: Timestamp,
) -> Result<Decision, serde_json::Error> {
    let api = world.deployments.get(&Key::new(namespace, component::VIRT_API));
    webhook_path::decide(&webhook_path::Observed {
        namespace,
        secret: world.secrets.get(&Key::new(namespace, api::webhook_path::SECRET)).as_deref(),
        configurations: &webhooks(world),
        ready: api.as_ref().is_some_and(|api| api.ready > 0),
        // Later changes were seen.
        missed: api.and_then(|api| api.availability_changed_at).filter(|at| *at <= since),
        now,
    })
}

fn certificates_decision(world: &World, namespace: &str, now: Timestamp) -> Result<Decision, serde_json::Error> {
    let secret = |name: &str| world.secrets.get(&Key::new(namespace, name));
    let held: Vec<_> =
        certificates::leaf_secrets().into_iter().filter_map(|name| Some((name.to_owned(), secret(name)?))).collect();
    let leaves = held.iter().map(|(name, secret)| (name.clone(), secret.as_ref())).collect();
    let map = world.config_maps.get(&Key::new(namespace, tls::CA_CONFIG_MAP));
    let authority = secret(tls::CA_SECRET);
    let observed = certificates::Observed {
        namespace,
        authority: authority.as_deref(),
        bundle: map.as_deref(),
        leaves: &leaves,
        lives: lives(world),
        now,
    };
    let mut decision = match certificates::decide(&observed) {
        Ok(decision) => decision,
        Err(certificates::CertificateError::Json(error)) => return Err(error),
        Err(error) => {
            tracing::error!(%error, "certificates cannot be made");
            let mut decision = Decision::settled();
            decision.wake(std::time::Duration::from_secs(30));
            decision
        }
    };
    if let Some(bundle) = bundle(world, namespace) {
        decision
            .effects
            .extend(carriers(world).iter().filter_map(|(kind, object)| certificates::inject(*kind, object, &bundle)));
    }
    Ok(decision)
}

fn request_decision(world: &World, namespace: &str, key: &Key, now: Timestamp) -> Result<Decision, serde_json::Error> {
    let Some(request) = world.requests.get(key) else { return Ok(Decision::settled()) };
    let secret = world.secrets.get(&Key::new(namespace, tls::CA_SECRET));
    // What signs has to be in the bundle.
    let published = bundle(world, namespace).unwrap_or_default();
    let authority =
        secret.as_deref().and_then(Authority::from_secret).filter(|authority| published.contains(authority.pem()));
    match certificates::decide_request(&request, namespace, authority.as_ref(), lives(world), now) {
        Ok(decision) => Ok(decision),
        Err(certificates::CertificateError::Json(error)) => Err(error),
        Err(error) => {
            tracing::error!(%error, "request cannot be answered");
            let mut decision = Decision::settled();
            decision.wake(std::time::Duration::from_secs(30));
            Ok(decision)
        }
    }
}

fn installation_decision(
    world: &World,
    namespace: &str,
    deployment: &kubevirt::Deployment,
    manages_roles: bool,
    now: Timestamp,
) -> Result<Decision, serde_json::Error> {
    let objects = world.kubevirts.filter(|object| object.metadata.deletion_timestamp.is_none());
    let Some(object) = objects.first() else { return Ok(Decision::settled()) };
    let api = world.deployments.get(&Key::new(namespace, component::VIRT_API));
    let controller = world.deployments.get(&Key::new(namespace, component::VIRT_CONTROLLER));
    let handler = world.daemon_sets.get(&Key::new(namespace, component::VIRT_HANDLER));
    let carriers = carriers(world);
    let expected = tls::API_SERVICES.len() + 1 + tls::VALIDATING_WEBHOOKS.len();
    let bundle_in_place = bundle(world, namespace).is_some_and(|bundle| {
        carriers.len() == expected
            && carriers.iter().all(|(_, object)| object.bundles.iter().all(|(_, known)| known == bundle.as_bytes()))
    });
    let secret = world.secrets.get(&Key::new(namespace, api::webhook_path::SECRET));
    let paths_in_place = webhook_path::in_place(secret.as_deref(), &webhooks(world));
    kubevirt::decide(&kubevirt::Observed {
        kubevirt: object,
        components: kubevirt::Components {
            api: api.as_deref(),
            controller: controller.as_deref(),
            handler: handler.as_deref(),
            bundle_in_place,
            paths_in_place,
            api_services_available: carriers.iter().all(|(_, object)| object.available),
        },
        version: VERSION,
        deployment,
        architecture: architecture(),
        outdated_machines: outdated(world).len(),
        roles: &world.roles.filter(|_| true),
        manages_roles,
        now,
    })
}

/// Machines whose launcher is of a former version.
fn outdated(world: &World) -> Vec<Arc<VirtualMachineInstance>> {
    world.instances.filter(|instance| instance.labels().contains_key(api::constants::label::OUTDATED_LAUNCHER_IMAGE))
}

fn eviction_decision(world: &World, batches: &workloads::Batches, now: Timestamp) -> Decision {
    let objects = world.kubevirts.filter(|object| object.metadata.deletion_timestamp.is_none());
    let Some(object) = objects.first() else { return Decision::settled() };
    let machines: Vec<node::Machine> = outdated(world)
        .into_iter()
        .map(|instance| {
            let pods = world.pods_of(&instance);
            node::Machine { instance, pods }
        })
        .collect();
    batches.decide(&workloads::Observed { kubevirt: object, outdated: &machines, now })
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
