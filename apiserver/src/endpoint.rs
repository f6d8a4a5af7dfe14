//! Which subresources there are: one table for dispatch, discovery and OpenAPI.

use http::Method;

use crate::path::{Attributes, GROUP, VERSIONS};

/// A subresource of VMs.
pub const MACHINES: &str = "virtualmachines";
/// A subresource of VMIs.
pub const INSTANCES: &str = "virtualmachineinstances";
/// The one resource here that belongs to a namespace only.
pub const EXPAND_VM_SPEC: &str = "expand-vm-spec";

/// A subresource that is served. Where VM and VMI have one of the same name, that of the VM starts with `Vm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subresource {
    /// Instance type and preference applied to a VM that is sent along.
    ExpandVmSpec,
    /// Graphical console.
    Vnc,
    /// Picture of the graphical console.
    Screenshot,
    /// Serial console.
    Console,
    /// Connection to a port of the guest.
    PortForward,
    /// Backup of a running machine.
    Backup,
    /// Checkpoint that libvirt is to know again.
    RedefineCheckpoint,
    /// Stop the processors.
    Pause,
    /// Let the processors go on.
    Unpause,
    /// Freeze the guest's file systems.
    Freeze,
    /// Thaw the guest's file systems.
    Unfreeze,
    /// Reset button.
    Reset,
    /// Reboot by the guest itself.
    SoftReboot,
    /// Start a VM.
    Start,
    /// Stop a VM.
    Stop,
    /// Restart a VM.
    Restart,
    /// Move a VM to another node.
    Migrate,
    /// A VM with instance type and preference applied.
    ExpandSpec,
    /// What a VM depends on.
    VmObjectGraph,
    /// Give up an evacuation.
    VmCancelEvacuation,
    /// What the guest agent says about the system.
    GuestOsInfo,
    /// Users logged in.
    UserList,
    /// Mounted file systems.
    FileSystemList,
    /// Hot-plug a volume.
    AddVolume,
    /// Unplug a volume.
    RemoveVolume,
    /// What a machine depends on.
    ObjectGraph,
    /// SEV certificate chain of the node.
    FetchCertChain,
    /// SEV launch measurement.
    QueryLaunchMeasurement,
    /// SEV session of the guest's owner.
    SetupSession,
    /// SEV launch secret.
    InjectLaunchSecret,
    /// Give up an evacuation.
    CancelEvacuation,
    /// Connection to a port of the VM's guest.
    VmPortForward,
    /// Hot-plug a volume.
    VmAddVolume,
    /// Unplug a volume.
    VmRemoveVolume,
    /// Write the guest's memory to a claim.
    MemoryDump,
    /// Detach the claim of memory dumps.
    RemoveMemoryDump,
    /// USB device of the client.
    UsbRedir,
    /// Connection to a VSOCK port of the guest.
    Vsock,
}

/// What clients know a subresource by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Plural resource.
    pub resource: &'static str,
    /// Name below the resource; empty for [`EXPAND_VM_SPEC`].
    pub name: &'static str,
    /// Whether it is read (GET) or carried out (PUT).
    pub reads: bool,
    /// Operation in OpenAPI documents; the version goes before it.
    pub operation: &'static str,
    /// What it does.
    pub description: &'static str,
}

impl Endpoint {
    const fn new(
        resource: &'static str,
        name: &'static str,
        reads: bool,
        operation: &'static str,
        description: &'static str,
    ) -> Self {
        Self { resource, name, reads, operation, description }
    }
}

const GET: bool = true;
const PUT: bool = false;

impl Subresource {
    /// All that are served, in the order of discovery.
    pub const ALL: [Self; 38] = [
        Self::ExpandVmSpec,
        Self::Vnc,
        Self::Screenshot,
        Self::Console,
        Self::PortForward,
        Self::Backup,
        Self::RedefineCheckpoint,
        Self::Pause,
        Self::Unpause,
        Self::Freeze,
        Self::Unfreeze,
        Self::Reset,
        Self::SoftReboot,
        Self::Start,
        Self::Stop,
        Self::Restart,
        Self::Migrate,
        Self::ExpandSpec,
        Self::VmObjectGraph,
        Self::VmCancelEvacuation,
        Self::GuestOsInfo,
        Self::UserList,
        Self::FileSystemList,
        Self::AddVolume,
        Self::RemoveVolume,
        Self::ObjectGraph,
        Self::FetchCertChain,
        Self::QueryLaunchMeasurement,
        Self::SetupSession,
        Self::InjectLaunchSecret,
        Self::CancelEvacuation,
        Self::VmPortForward,
        Self::VmAddVolume,
        Self::VmRemoveVolume,
        Self::MemoryDump,
        Self::RemoveMemoryDump,
        Self::UsbRedir,
        Self::Vsock,
    ];

    /// How many of [`Self::ALL`] are named in discovery. The others have always been served without being named.
    pub const LISTED: usize = 31;

    /// What clients know it by.
    #[must_use]
    #[rustfmt::skip]
    pub const fn endpoint(self) -> Endpoint {
        match self {
            Self::ExpandVmSpec => Endpoint::new(EXPAND_VM_SPEC, "", PUT, "ExpandSpec", "Apply instance type and preference to the VirtualMachine that is sent along"),
            Self::Vnc => Endpoint::new(INSTANCES, "vnc", GET, "VNC", "Open a websocket to the display"),
            Self::Screenshot => Endpoint::new(INSTANCES, "vnc/screenshot", GET, "VNCScreenshot", "Get a picture of the display as PNG"),
            Self::Console => Endpoint::new(INSTANCES, "console", GET, "Console", "Open a websocket to the serial console"),
            Self::PortForward => Endpoint::new(INSTANCES, "portforward", GET, "vmi-PortForward", "Open a websocket to a port of the guest"),
            Self::Backup => Endpoint::new(INSTANCES, "backup", PUT, "Backup", "Back up the disks of a running machine"),
            Self::RedefineCheckpoint => Endpoint::new(INSTANCES, "redefine-checkpoint", PUT, "RedefineCheckpoint", "Make a checkpoint known again"),
            Self::Pause => Endpoint::new(INSTANCES, "pause", PUT, "Pause", "Stop the processors"),
            Self::Unpause => Endpoint::new(INSTANCES, "unpause", PUT, "Unpause", "Let the processors go on"),
            Self::Freeze => Endpoint::new(INSTANCES, "freeze", PUT, "Freeze", "Freeze the guest's file systems"),
            Self::Unfreeze => Endpoint::new(INSTANCES, "unfreeze", PUT, "Unfreeze", "Thaw the guest's file systems"),
            Self::Reset => Endpoint::new(INSTANCES, "reset", PUT, "Reset", "Reset the guest without asking it"),
            Self::SoftReboot => Endpoint::new(INSTANCES, "softreboot", PUT, "SoftReboot", "Ask the guest to reboot"),
            Self::Start => Endpoint::new(MACHINES, "start", PUT, "Start", "Start a VirtualMachine"),
            Self::Stop => Endpoint::new(MACHINES, "stop", PUT, "Stop", "Stop a VirtualMachine"),
            Self::Restart => Endpoint::new(MACHINES, "restart", PUT, "Restart", "Restart a VirtualMachine"),
            Self::Migrate => Endpoint::new(MACHINES, "migrate", PUT, "Migrate", "Move a running VirtualMachine to another node"),
            Self::ExpandSpec => Endpoint::new(MACHINES, "expand-spec", GET, "vm-ExpandSpec", "Get the VirtualMachine with instance type and preference applied"),
            Self::VmObjectGraph => Endpoint::new(MACHINES, "objectgraph", GET, "vm-objectgraph", "Get the objects that a VirtualMachine depends on"),
            Self::VmCancelEvacuation => Endpoint::new(MACHINES, "evacuate/cancel", PUT, "vm-evacuatecancel", "Give up the evacuation of a VirtualMachine"),
            Self::GuestOsInfo => Endpoint::new(INSTANCES, "guestosinfo", GET, "Guestosinfo", "Get what the guest agent says about the system"),
            Self::UserList => Endpoint::new(INSTANCES, "userlist", GET, "Userlist", "Get the users logged in to the guest"),
            Self::FileSystemList => Endpoint::new(INSTANCES, "filesystemlist", GET, "Filesystemlist", "Get the file systems mounted in the guest"),
            Self::AddVolume => Endpoint::new(INSTANCES, "addvolume", PUT, "vmi-addvolume", "Add a volume to a running machine"),
            Self::RemoveVolume => Endpoint::new(INSTANCES, "removevolume", PUT, "vmi-removevolume", "Remove a volume from a running machine"),
            Self::ObjectGraph => Endpoint::new(INSTANCES, "objectgraph", GET, "vmi-objectgraph", "Get the objects that a machine depends on"),
            Self::FetchCertChain => Endpoint::new(INSTANCES, "sev/fetchcertchain", GET, "SEVFetchCertChain", "Get the SEV certificate chain of the machine's node"),
            Self::QueryLaunchMeasurement => Endpoint::new(INSTANCES, "sev/querylaunchmeasurement", GET, "SEVQueryLaunchMeasurement", "Get the SEV launch measurement"),
            Self::SetupSession => Endpoint::new(INSTANCES, "sev/setupsession", PUT, "SEVSetupSession", "Set the SEV session parameters"),
            Self::InjectLaunchSecret => Endpoint::new(INSTANCES, "sev/injectlaunchsecret", PUT, "SEVInjectLaunchSecret", "Hand the SEV launch secret to the guest"),
            Self::CancelEvacuation => Endpoint::new(INSTANCES, "evacuate/cancel", PUT, "vmi-evacuatecancel", "Give up the evacuation of a machine"),
            Self::VmPortForward => Endpoint::new(MACHINES, "portforward", GET, "vm-PortForward", "Open a websocket to a port of the VirtualMachine's guest"),
            Self::VmAddVolume => Endpoint::new(MACHINES, "addvolume", PUT, "vm-addvolume", "Add a volume to a VirtualMachine"),
            Self::VmRemoveVolume => Endpoint::new(MACHINES, "removevolume", PUT, "vm-removevolume", "Remove a volume from a VirtualMachine"),
            Self::MemoryDump => Endpoint::new(MACHINES, "memorydump", PUT, "MemoryDump", "Write the guest's memory to a claim"),
            Self::RemoveMemoryDump => Endpoint::new(MACHINES, "removememorydump", PUT, "RemoveMemoryDump", "Detach the claim of memory dumps"),
            Self::UsbRedir => Endpoint::new(INSTANCES, "usbredir", GET, "usbredir", "Open a websocket that carries a USB device"),
            Self::Vsock => Endpoint::new(INSTANCES, "vsock", GET, "VSOCK", "Open a websocket to a VSOCK port of the guest"),
        }
    }

    /// The method it is called with.
    #[must_use]
    pub const fn method(self) -> Method {
        if self.endpoint().reads { Method::GET } else { Method::PUT }
    }

    /// The name in discovery, which is also its metric label: `virtualmachines/start`.
    #[must_use]
    pub fn full_name(self) -> String {
        let Endpoint { resource, name, .. } = self.endpoint();
        if name.is_empty() { resource.to_owned() } else { format!("{resource}/{name}") }
    }

    /// Whether failures are answered 500 with a plain text: those of all that is read from the node agent at once.
    #[must_use]
    pub const fn fails_plainly(self) -> bool {
        matches!(
            self,
            Self::Screenshot
                | Self::GuestOsInfo
                | Self::UserList
                | Self::FileSystemList
                | Self::FetchCertChain
                | Self::QueryLaunchMeasurement
        )
    }

    /// Whether it can be tried: with `dryRun` it is checked, and changes nothing.
    #[must_use]
    pub const fn can_be_tried(self) -> bool {
        matches!(
            self,
            Self::Start
                | Self::Stop
                | Self::Restart
                | Self::Migrate
                | Self::Pause
                | Self::Unpause
                | Self::CancelEvacuation
                | Self::VmCancelEvacuation
                | Self::AddVolume
                | Self::RemoveVolume
                | Self::VmAddVolume
                | Self::VmRemoveVolume
        )
    }

    /// Whether it changes anything.
    #[must_use]
    pub const fn changes(self) -> bool {
        !self.endpoint().reads && !matches!(self, Self::ExpandVmSpec)
    }

    /// Whether what is sent along has to be called JSON. Others look at the body, whatever it is called.
    #[must_use]
    pub const fn takes_json_only(self) -> bool {
        matches!(
            self,
            Self::ExpandVmSpec
                | Self::GuestOsInfo
                | Self::UserList
                | Self::FileSystemList
                | Self::ObjectGraph
                | Self::VmObjectGraph
                | Self::FetchCertChain
                | Self::QueryLaunchMeasurement
        )
    }

    /// Whether it answers with a JSON document.
    #[must_use]
    pub const fn answers_json(self) -> bool {
        match self {
            Self::ExpandVmSpec => true,
            Self::Vnc
            | Self::Screenshot
            | Self::Console
            | Self::PortForward
            | Self::VmPortForward
            | Self::UsbRedir
            | Self::Vsock => false,
            _ => self.endpoint().reads,
        }
    }
}

/// Why an authorized request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotServed {
    /// 404
    NoSuchPath,
    /// 405; the method that would be served.
    WrongMethod(&'static str),
}

/// What an authorized request asks for.
pub fn find(attributes: &Attributes, method: &Method) -> Result<Subresource, NotServed> {
    if attributes.group != GROUP || !VERSIONS.contains(&attributes.version.as_str()) {
        return Err(NotServed::NoSuchPath);
    }
    let found = Subresource::ALL
        .into_iter()
        .find(|subresource| {
            let endpoint = subresource.endpoint();
            endpoint.resource == attributes.resource && endpoint.name == attributes.subresource
        })
        .ok_or(NotServed::NoSuchPath)?;
    if found.method() == *method {
        Ok(found)
    } else {
        Err(NotServed::WrongMethod(if found.endpoint().reads { "GET" } else { "PUT" }))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::path::attributes;

    #[test]
    fn each_is_in_the_table_once_and_named_once() {
        let variants = Subresource::ALL.into_iter().collect::<std::collections::HashSet<_>>();
        let names = Subresource::ALL.map(Subresource::full_name).into_iter().collect::<BTreeSet<_>>();
        assert_eq!((variants.len(), names.len()), (Subresource::ALL.len(), Subresource::ALL.len()));
        assert!(Subresource::ALL[Subresource::LISTED - 1] == Subresource::CancelEvacuation);
    }

    #[test]
    fn each_is_found_in_both_versions_by_its_method_only() {
        for version in VERSIONS {
            for expected in Subresource::ALL {
                let path = match expected {
                    Subresource::ExpandVmSpec => format!("/apis/{GROUP}/{version}/namespaces/a/expand-vm-spec"),
                    _ => {
                        let endpoint = expected.endpoint();
                        format!("/apis/{GROUP}/{version}/namespaces/a/{}/b/{}", endpoint.resource, endpoint.name)
                    }
                };
                let right = attributes(&expected.method(), &path).unwrap();
                assert_eq!(find(&right, &expected.method()), Ok(expected));
                let wrong = attributes(&Method::POST, &path).unwrap();
                assert!(matches!(find(&wrong, &Method::POST), Err(NotServed::WrongMethod(_))));
            }
        }
    }

    #[test]
    fn what_is_not_served_is_not_found() {
        for path in [
            "/apis/subresources.kubevirt.io/v2/namespaces/a/virtualmachines/b/start",
            "/apis/example.com/v1/namespaces/a/virtualmachines/b/start",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachines/b/console",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachineinstances/b/migrate",
            "/apis/subresources.kubevirt.io/v1/namespaces/a/virtualmachineinstances/b/sev",
        ] {
            let found = attributes(&Method::PUT, path).unwrap();
            assert_eq!(find(&found, &Method::PUT), Err(NotServed::NoSuchPath), "{path}");
        }
    }
}
