//! Examples in the help of the commands.

use std::fmt::Write;

use clap::{Command, builder::StyledStr};

/// Order of the help: the options of all commands are the last ones of the arguments.
const TEMPLATE: &str = "{about-with-newline}\n{usage-heading} {usage}\n\n{before-help}{all-args}";

/// Examples of a command: purpose and arguments.
type Examples = &'static [(&'static str, &'static str)];

/// Examples by command.
const EXAMPLES: [(&str, Examples); 53] = [
    (
        "create",
        &[(
            "Create a VM that boots from a container disk",
            "create vm --name my-vm --volume-containerdisk src:quay.io/containerdisks/fedora:latest | kubectl apply -f -",
        )],
    ),
    (
        "create vm",
        &[
            (
                "Choose an instance type and a preference",
                "create vm --instancetype u1.small --preference fedora --volume-containerdisk src:my-image",
            ),
            (
                "Import an image from a web server, and boot from it",
                "create vm --volume-import type:http,url:https://example.com/disk.qcow2,size:10Gi,bootorder:1",
            ),
            (
                "Configure the user by cloud-init",
                "create vm --user joe --password-file my-password --volume-pvc src:my-disk",
            ),
        ],
    ),
    ("create instancetype", &[("Make an instance type of the cluster", "create instancetype --cpu 2 --memory 4Gi")]),
    (
        "create preference",
        &[("Make a preference of a namespace", "create preference --cpu-topology sockets --namespaced")],
    ),
    ("create clone", &[("Clone a VM", "create clone --source-name my-vm --target-name my-copy")]),
    (
        "describe",
        &[
            ("Print a page about a VM", "describe my-vm"),
            ("Print why it waits", "describe my-vm --output=json | jq -r .detail"),
        ],
    ),
    (
        "top",
        &[
            ("Print the VMs of all namespaces that need most CPU first", "top --all-namespaces --sort-by=cpu"),
            ("Print each disk and interface of a VM, measured for five seconds", "top my-vm --devices --interval=5s"),
        ],
    ),
    (
        "console",
        &[
            ("Connect to the serial console; Ctrl+] leaves it", "console my-vm"),
            ("Print the most recent output of the guest first", "console my-vm --replay"),
        ],
    ),
    (
        "vnc",
        &[
            ("Open the display in the first viewer found in PATH", "vnc my-vm"),
            ("Print a local port for a viewer of your choice", "vnc my-vm --proxy-only"),
            ("Save a screenshot", "vnc my-vm --screenshot my-vm.png"),
        ],
    ),
    ("vnc screenshot", &[("Save a screenshot", "vnc screenshot my-vm --file my-vm.png")]),
    (
        "ui",
        &[
            ("List the VMs of the namespace in the browser", "ui"),
            ("Print the URL of a page for all namespaces", "ui --all-namespaces --no-open"),
        ],
    ),
    (
        "start",
        &[
            ("Start a VM and wait until it is ready", "start my-vm --wait"),
            ("Start a VM with its vCPUs stopped", "start my-vm --paused"),
            ("Boot a hibernated VM, and remove its saved memory", "start my-vm --discard"),
        ],
    ),
    (
        "stop",
        &[
            ("Shut the guest down and wait for its end", "stop my-vm --wait"),
            ("Stop it at once, like pulling the plug", "stop my-vm --grace-period=0 --force"),
        ],
    ),
    (
        "restart",
        &[
            ("Restart a VM and wait until it is ready again", "restart my-vm --wait"),
            ("Restart it without shutting the guest down", "restart my-vm --grace-period=0 --force"),
        ],
    ),
    ("pause", &[("Pause a VM", "pause vm my-vm"), ("Pause a VMI without a VM", "pause vmi my-vmi")]),
    ("unpause", &[("Resume a paused VM", "unpause vm my-vm")]),
    ("soft-reboot", &[("Ask the guest to reboot", "soft-reboot my-vm")]),
    ("reset", &[("Reset a guest that hangs", "reset my-vm")]),
    (
        "migrate",
        &[
            ("Migrate a VM and print the progress", "migrate my-vm --wait"),
            ("Migrate it to a node of a zone", "migrate my-vm --added-node-selector topology.kubernetes.io/zone=a"),
        ],
    ),
    ("migrate-cancel", &[("Cancel the migration of a VM", "migrate-cancel my-vm")]),
    (
        "evacuate-cancel",
        &[
            ("Keep a VM on its node, and cancel its migration", "evacuate-cancel vm my-vm --migrate-cancel"),
            ("Keep all VMIs on a node", "evacuate-cancel node node1"),
        ],
    ),
    ("drain-status", &[("Print the VMIs that a drain waits for", "drain-status node1")]),
    (
        "addvolume",
        &[
            ("Plug a claim in as SCSI disk", "addvolume my-vm --volume-name=my-claim"),
            (
                "Choose the serial number by which the guest finds it",
                "addvolume my-vm --volume-name=my-claim --serial=DATA",
            ),
        ],
    ),
    ("removevolume", &[("Unplug a volume", "removevolume my-vm --volume-name=my-claim")]),
    ("set", &[("Set the memory of a VM and wait until the guest uses it", "set memory my-vm --guest=2Gi --wait")]),
    ("set cpu", &[("Set the number of sockets and wait", "set cpu my-vm --sockets=2 --wait")]),
    ("set memory", &[("Set the memory and wait until the guest uses it", "set memory my-vm --guest=2Gi --wait")]),
    (
        "memory-dump",
        &[
            ("Dump the memory to a new claim", "memory-dump get my-vm --claim-name=my-dump --create-claim"),
            ("Remove the association with the claim", "memory-dump remove my-vm"),
        ],
    ),
    (
        "hibernate",
        &[
            ("Save the memory of a VM to a claim that is made for it, and stop the VM", "hibernate my-vm --wait"),
            ("Save it to a claim of your own", "hibernate my-vm --claim my-claim"),
            ("Boot it at its next start instead", "hibernate my-vm --discard"),
        ],
    ),
    (
        "snapshot",
        &[
            ("Take a snapshot, and wait until it can be restored", "snapshot my-vm my-snapshot --wait"),
            ("Keep the volume snapshots when the snapshot is deleted", "snapshot my-vm --retain"),
        ],
    ),
    (
        "restore",
        &[
            ("Stop a VM and give it its state at a snapshot", "restore my-vm my-snapshot --stop --wait"),
            (
                "Create another VM from the snapshot, without a fixed MAC address",
                "restore my-copy my-snapshot --patch='{\"op\":\"remove\",\"path\":\"/spec/template/spec/domain/devices/interfaces/0/macAddress\"}'",
            ),
        ],
    ),
    (
        "clone",
        &[
            ("Clone a VM, with MAC addresses and serials of its own", "clone my-vm my-copy --wait"),
            ("Clone a snapshot", "clone my-snapshot my-copy --snapshot"),
        ],
    ),
    (
        "image-upload",
        &[
            ("Upload an image to a new DataVolume", "image-upload dv my-disk --size=10Gi --image-path=disk.qcow2"),
            (
                "Label the claim with a default instance type and preference",
                "image-upload pvc my-disk --size=10Gi --image-path=disk.qcow2 --default-instancetype=u1.small \
                 --default-preference=fedora",
            ),
        ],
    ),
    ("credentials", &[("Add an SSH key to a VM", "credentials add-ssh-key my-vm --user=joe --file=id_ed25519.pub")]),
    (
        "credentials add-ssh-key",
        &[
            ("Add an SSH key", "credentials add-ssh-key my-vm --user=joe --file=id_ed25519.pub"),
            ("Use a new Secret", "credentials add-ssh-key my-vm --user=joe --file=id_ed25519.pub --create-secret"),
        ],
    ),
    (
        "credentials remove-ssh-key",
        &[("Remove an SSH key", "credentials remove-ssh-key my-vm --user=joe --file=id_ed25519.pub")],
    ),
    (
        "credentials set-password",
        &[("Set the password of a user", "credentials set-password my-vm --user=joe --password-file=my-password")],
    ),
    ("permitted-devices", &[("Print the devices", "permitted-devices")]),
    ("adm", &[("Print the log verbosity of all components", "adm log-verbosity --all")]),
    (
        "adm log-verbosity",
        &[
            ("Set that of virt-handler", "adm log-verbosity --virt-handler=7"),
            (
                "Reset all, and set that of a VM from its next start on",
                "adm log-verbosity --reset --vm=my-vm --level=5",
            ),
        ],
    ),
    (
        "expose",
        &[
            ("Create a Service for a port of a VM", "expose vm my-vm --name=web --port=80 --target-port=8080"),
            ("Open a port of each node for SSH", "expose vm my-vm --name=ssh --port=22 --type=NodePort"),
        ],
    ),
    (
        "port-forward",
        &[
            ("Forward local port 8080 to port 80 of a VM", "port-forward vm/my-vm 8080:80"),
            ("Forward a UDP port", "port-forward vm/my-vm udp/5353:53"),
        ],
    ),
    (
        "ssh",
        &[
            ("Log in to a VM", "ssh root@vm/my-vm"),
            ("Run a command in a VM of another namespace", "ssh root@vm/my-vm/my-namespace --command uptime"),
        ],
    ),
    (
        "scp",
        &[
            ("Copy a file to a VM", "scp ./file root@vm/my-vm:/tmp/file"),
            ("Copy a directory from a VM", "scp --recursive root@vm/my-vm:/var/log ./logs"),
        ],
    ),
    ("usbredir", &[("Redirect a device that lsusb lists", "usbredir 0951:1666 my-vm")]),
    ("guestosinfo", &[("Print the operating system as a table", "guestosinfo my-vm --output=table")]),
    ("userlist", &[("Print the users who are logged in", "userlist my-vm --output=table")]),
    ("fslist", &[("Print the file systems with their sizes", "fslist my-vm --output=table")]),
    (
        "expand",
        &[
            ("Print a VM of the cluster", "expand --vm my-vm"),
            ("Print a VM of a file", "expand --file my-vm.yaml --output=json"),
        ],
    ),
    ("objectgraph", &[("Print the objects that a VM needs, for example for a backup", "objectgraph my-vm")]),
    (
        "support-bundle",
        &[
            ("Collect what is about one VM", "support-bundle my-vm"),
            ("Choose the file", "support-bundle --output my-bundle.tar.gz"),
        ],
    ),
    (
        "version",
        &[("Print both versions as YAML", "version --output=yaml"), ("Print that of the client", "version --client")],
    ),
    ("completion", &[("Print the script for bash; it completes kubectl-virt", "completion bash")]),
];

/// Adds its examples to each command.
pub(crate) fn with_examples(command: Command) -> Command {
    of_command(command.help_template(TEMPLATE), "")
}

fn of_command(command: Command, parent: &str) -> Command {
    let of_child = |child: Command| {
        let path = format!("{parent} {}", child.get_name()).trim_start().to_owned();
        let examples = EXAMPLES.iter().find(|(name, _)| *name == path).map_or(&[][..], |(_, examples)| examples);
        of_command(child.help_template(TEMPLATE).before_help(rendered(examples)), &path)
    };
    command.mut_subcommands(of_child)
}

/// Renders examples as kubectl does.
fn rendered(examples: &[(&str, &str)]) -> StyledStr {
    let mut text = StyledStr::from("Examples:");
    for (purpose, words) in examples {
        // Writing to memory cannot fail.
        let _ = write!(text, "\n  # {purpose}\n  kubectl virt {words}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::command_line::{definition, parse};

    /// Returns the paths of all commands.
    fn paths(command: &Command, parent: &str) -> Vec<String> {
        let children = command.get_subcommands().filter(|child| child.get_name() != "help");
        let with_descendants = |child: &Command| {
            let path = format!("{parent} {}", child.get_name()).trim_start().to_owned();
            [vec![path.clone()], paths(child, &path)].concat()
        };
        children.flat_map(with_descendants).collect()
    }

    #[test]
    fn each_command_has_examples_that_it_accepts() {
        let known: BTreeSet<String> = EXAMPLES.iter().map(|(command, _)| (*command).to_owned()).collect();
        assert_eq!(paths(&definition(), "").into_iter().collect::<BTreeSet<_>>(), known);
        for (command, examples) in EXAMPLES {
            assert!(!examples.is_empty(), "{command}");
            for (_, words) in examples {
                assert!(words.starts_with(command), "{words} is an example of {command}");
                let own = words.split(' ').take_while(|word| *word != "|");
                let line = ["kubectl-virt"].into_iter().chain(own).collect::<Vec<_>>();
                assert_eq!(parse(line).err().map(|error| error.to_string()), None, "{words}");
            }
        }
    }

    #[test]
    fn help_has_examples_first_and_the_global_options_last() {
        let Err(help) = parse(vec!["kubectl-virt", "start", "--help"]) else { panic!("no help") };
        let help = help.to_string();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("no {text:?} in {help}"));
        let order = [
            "Usage:",
            "Examples:\n  # ",
            "  kubectl virt start my-vm --wait\n",
            "Arguments:",
            "Options:",
            "--dry-run",
            "--help",
            "Global options:",
            "--kubeconfig",
        ];
        assert!(order.iter().map(|text| at(text)).is_sorted(), "{help}");
        let last = help.rsplit("Global options:").next().unwrap_or_default();
        assert!(!last.contains("\n\n") && last.contains("--namespace") && last.contains("--v"), "{help}");
    }
}
