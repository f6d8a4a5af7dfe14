//! `cluster`: the command line of the test cluster.

use std::{ffi::OsString, os::unix::process::CommandExt, path::PathBuf, process::ExitCode};

use anyhow::{Context, anyhow, bail};
use clap::{Parser, Subcommand};
use ferrovirt_e2e_cluster::{
    chart, components, demo, deps, down, host, images, init, install,
    kubernetes::{FeatureGate, Kubernetes},
    lock,
    plan::{Plan, find_workspace},
    progress::Progress,
    session, status,
    target::{Target, foreign},
    uninstall,
    up::{self, Size},
    variant, vm,
};

/// A real Kubernetes cluster on this host, for tests and new users.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Number of the cluster, if several run side by side (determines names, addresses and files)
    #[arg(long, global = true, default_value_t = 0, env = "FERROVIRT_INSTANCE")]
    instance: u8,
    /// Version of Kubernetes; by default that of the running cluster, or 1.36
    #[arg(long, global = true)]
    kubernetes: Option<Kubernetes>,
    /// Feature gates of the control plane and the kubelets, as NAME=true,NAME=false
    #[arg(long, global = true, value_delimiter = ',')]
    feature_gates: Vec<FeatureGate>,
    /// Nodes (node-2, ...) whose kubelets give pods CPUs of their own: all of the host but the first
    #[arg(long, global = true, value_delimiter = ',', env = "FERROVIRT_STATIC_CPUS")]
    static_cpus: Vec<String>,
    /// Nodes, pods and Services have IPv6 addresses, too
    #[arg(long, global = true)]
    dual_stack: bool,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Brings the cluster up or adds nodes to it; does nothing if it is up
    Up(Size),
    /// Removes everything that the cluster created; logs stay in build/cluster
    Down,
    /// Shows the status; fails if the API server is not ready
    Status,
    /// Imports OCI archives into every node
    LoadImage {
        /// The archives
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Checks the dependencies on this host and installs missing Debian packages
    Deps,
    /// Builds the programs of the cluster, unless they are cached
    BuildComponents,
    /// Builds KWOK, unless it is cached, and prints the path of the program
    BuildKwok,
    /// Builds Helm, unless it is cached, and prints the path of the program
    BuildHelm,
    /// Builds a container registry, unless it is cached, and prints the path of the program
    BuildRegistry,
    /// Builds promtool, unless it is cached, and prints the path of the program
    BuildPromtool,
    /// Builds metrics-server, unless it is cached, and prints the path of the program
    BuildMetricsServer,
    /// Builds csi-sanity, unless it is cached, and prints the path of the program
    BuildCsiSanity,
    /// Lints the chart and checks the manifests that it renders; needs no cluster
    CheckChart,
    /// Checks and tests the chart's rules for Prometheus; needs no cluster
    CheckRules,
    /// Installs Ferrovirt into the cluster of KUBECONFIG, or into the own one, which is brought up
    Install(Size),
    /// Uninstalls Ferrovirt; fails if anything but CRDs is left
    Uninstall,
    /// Installs Ferrovirt and runs the example VM
    Demo {
        /// Minimum number of nodes of the own cluster; by default two if 4 GiB of memory are available
        #[arg(long)]
        nodes: Option<u8>,
    },
    /// Installs Ferrovirt, runs a command against the cluster, and removes the cluster if it was not up before
    Run {
        #[command(flatten)]
        size: Size,
        /// The command
        #[arg(required = true, trailing_var_arg = true)]
        command: Vec<OsString>,
    },
    /// Prints shell exports for kubectl, helm and ctr of this cluster, and the address for a registry on the host
    Env,
    /// Runs a command on a node (node-1, ...) or beside the API server (control)
    Exec {
        /// Name of the node, or control
        node: String,
        /// The command
        #[arg(required = true, trailing_var_arg = true)]
        command: Vec<OsString>,
    },
    /// Runs as the first process of a namespace
    #[command(hide = true)]
    Init {
        /// File with the configuration
        configuration: PathBuf,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cluster: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let Action::Init { configuration } = &arguments.action {
        init::run(configuration)?;
        return Ok(ExitCode::FAILURE);
    }
    let progress = Progress::start();
    let folder = std::env::current_dir().context("finding the current folder")?;
    let mut plan = Plan::new(find_workspace(&folder)?, arguments.instance)?;
    plan.variant = variant::choose(
        &plan,
        arguments.kubernetes,
        &arguments.feature_gates,
        &arguments.static_cpus,
        arguments.dual_stack,
    )?;
    let uses_target =
        matches!(arguments.action, Action::Install(_) | Action::Uninstall | Action::Demo { .. } | Action::Run { .. });
    if (arguments.kubernetes.is_some() || !arguments.feature_gates.is_empty() || arguments.dual_stack)
        && uses_target
        && let Some(kubeconfig) = foreign(&plan, std::env::var_os("KUBECONFIG").map(PathBuf::from))
    {
        let kubeconfig = kubeconfig.display();
        bail!(
            "--kubernetes, --feature-gates and --dual-stack choose the test cluster, but KUBECONFIG names another: \
             {kubeconfig}"
        );
    }
    match &arguments.action {
        Action::Up(size) => {
            let _lock = lock(&plan, &progress)?;
            up::up(&plan, *size, &progress)?;
        }
        Action::Down => {
            let _lock = lock(&plan, &progress)?;
            down::down(&plan, &progress)?;
        }
        Action::Status => {
            let (text, ready) = status::status(&plan)?;
            print!("{text}");
            return Ok(if ready { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Action::LoadImage { files } => {
            let _lock = lock(&plan, &progress)?;
            images::load(&plan, &components::bin(&plan)?, files, &progress)?;
        }
        Action::Deps => {
            let own = foreign(&plan, std::env::var_os("KUBECONFIG").map(PathBuf::from)).is_none();
            deps::install(own, &progress)?;
        }
        Action::BuildKwok => {
            let bin = components::ensure_module(&plan, &components::KWOK, &progress.to_stderr())?;
            println!("{}", bin.join("kwok").display());
        }
        Action::BuildHelm => println!("{}", components::helm(&plan, &progress.to_stderr())?.display()),
        Action::BuildRegistry => {
            let bin = components::ensure_module(&plan, &components::REGISTRY, &progress.to_stderr())?;
            println!("{}", bin.join("registry").display());
        }
        Action::BuildPromtool => {
            let bin = components::ensure_module(&plan, &components::PROMTOOL, &progress.to_stderr())?;
            println!("{}", bin.join("promtool").display());
        }
        Action::BuildMetricsServer => {
            let bin = components::ensure_module(&plan, &components::METRICS_SERVER, &progress.to_stderr())?;
            println!("{}", bin.join("metrics-server").display());
        }
        Action::BuildCsiSanity => {
            let bin = components::ensure_module(&plan, &components::CSI_SANITY, &progress.to_stderr())?;
            println!("{}", bin.join("csi-sanity").display());
        }
        Action::CheckChart => chart::check(&plan, &progress)?,
        Action::CheckRules => chart::check_rules(&plan, &progress)?,
        Action::BuildComponents => {
            let _lock = lock(&plan, &progress)?;
            println!("{}", components::ensure(&plan, &progress)?.display());
        }
        Action::Env => {
            println!("export PATH={}:$PATH", components::bin(&plan)?.display());
            println!("export KUBECONFIG={}", plan.kubeconfig().display());
            println!("export CLUSTER_REGISTRY={}", plan.registry());
        }
        Action::Exec { node, command } => {
            let namespace = format!("{}-{node}", plan.prefix());
            let pid = host::init_process(&namespace).ok_or_else(|| anyhow!("{node} is not running"))?;
            if *node == plan.vm_node().name {
                let command: Vec<_> = command.iter().map(|part| part.to_string_lossy()).collect();
                print!("{}", vm::command(pid, &command.iter().map(|part| &**part).collect::<Vec<_>>())?);
                return Ok(ExitCode::SUCCESS);
            }
            let error = images::enter(pid, ["--mount", "--net", "--uts", "--pid"]).args(command).exec();
            return Err(error).context("starting nsenter");
        }
        Action::Uninstall => uninstall::uninstall(&Target::ready(&plan, Size::default(), &progress)?, &progress)?,
        Action::Install(size) => {
            install::install(&plan, &Target::ready(&plan, *size, &progress)?, &progress)?;
        }
        Action::Demo { nodes } => {
            let target =
                Target::ready(&plan, Size { nodes: nodes.unwrap_or_else(demo::nodes), ..Size::default() }, &progress)?;
            install::install(&plan, &target, &progress)?;
            demo::demo(&plan, &target, &progress)?;
        }
        Action::Run { size, command } => {
            let done = session::run(&plan, *size, command, &progress)?;
            return Ok(if done { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Action::Init { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}
