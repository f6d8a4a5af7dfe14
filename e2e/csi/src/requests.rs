//! Meaning of requests: content, size and limits of the volume that they describe.

use std::collections::{BTreeMap, HashMap};

use tonic::Status;

use crate::{
    faults::Faults,
    identity::DRIVER,
    proto::csi::v1::{
        CapacityRange, Topology, TopologyRequirement, VolumeCapability,
        volume_capability::{AccessType, access_mode::Mode},
    },
    record::{Content, Volume},
};

/// Sizes are multiples of this.
const UNIT: u64 = 1 << 20;
/// Size of a volume without a requested one.
const DEFAULT_SIZE: u64 = 1 << 30;

/// Parameters of a storage class.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// Content of volumes with a file system.
    files: Content,
    /// True if only one node can use a volume.
    pub one_node: bool,
    pub snapshots: bool,
    pub faults: Faults,
}

impl Parameters {
    /// Parses the parameters. Those of the provisioner itself have a prefix.
    pub(crate) fn parse(parameters: &HashMap<String, String>) -> Result<Self, Status> {
        let mut parsed =
            Self { files: Content::Directory, one_node: false, snapshots: true, faults: Faults::default() };
        for (name, value) in parameters.iter().filter(|(name, _)| !name.starts_with("csi.storage.k8s.io/")) {
            match (name.as_str(), value.as_str()) {
                ("files", "directory") => parsed.files = Content::Directory,
                ("files", "ext4") => parsed.files = Content::Ext4,
                ("reach", "node") => parsed.one_node = true,
                ("reach", "cluster") => parsed.one_node = false,
                ("snapshots", "true") => parsed.snapshots = true,
                ("snapshots", "false") => parsed.snapshots = false,
                ("faults", faults) => {
                    parsed.faults = faults.parse().map_err(|error| invalid(format!("{error}")))?;
                }
                _ => return Err(invalid(format!("parameter {name}={value} is not known"))),
            }
        }
        Ok(parsed)
    }

    /// Returns the content of a volume with these capabilities.
    pub(crate) fn content(&self, capabilities: &[VolumeCapability]) -> Result<Content, Status> {
        let mut contents = capabilities.iter().map(|capability| match is_block(capability)? {
            true => Ok(Content::Block),
            false => Ok(self.files),
        });
        let first = contents.next().ok_or_else(|| invalid("volume capabilities are missing"))??;
        if contents.any(|content: Result<_, Status>| content.is_ok_and(|content| content != first)) {
            return Err(invalid("a volume is either a block device or has a file system"));
        }
        if self.one_node && capabilities.iter().any(is_for_many) {
            return Err(invalid("several nodes cannot use a volume of a class with reach=node"));
        }
        Ok(first)
    }
}

/// Returns the status of a request that is not valid.
pub(crate) fn invalid(message: impl Into<String>) -> Status {
    Status::invalid_argument(message)
}

/// Rejects an empty field.
pub(crate) fn require(field: &str, value: &str) -> Result<(), Status> {
    if value.is_empty() { Err(invalid(format!("{field} is missing"))) } else { Ok(()) }
}

/// Returns true for a block device, false for a file system.
fn is_block(capability: &VolumeCapability) -> Result<bool, Status> {
    match &capability.access_type {
        Some(AccessType::Block(_)) => Ok(true),
        Some(AccessType::Mount(mount)) if ["", "ext4"].contains(&mount.fs_type.as_str()) => Ok(false),
        Some(AccessType::Mount(mount)) => Err(invalid(format!("file system {} is not supported", mount.fs_type))),
        None => Err(invalid("the access type of a volume capability is missing")),
    }
}

fn is_for_many(capability: &VolumeCapability) -> bool {
    let mode = capability.access_mode.as_ref().map(|mode| mode.mode());
    matches!(mode, Some(Mode::MultiNodeReaderOnly | Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter))
}

/// Rejects a capability that a volume does not have.
pub(crate) fn check_capability(volume: &Volume, capability: Option<&VolumeCapability>) -> Result<(), Status> {
    let capability = capability.ok_or_else(|| invalid("volume capability is missing"))?;
    if is_block(capability)? != (volume.content == Content::Block) {
        return Err(invalid(format!("volume {} has another access type", volume.id)));
    }
    if volume.node.is_some() && is_for_many(capability) {
        return Err(invalid(format!("several nodes cannot use volume {}", volume.id)));
    }
    Ok(())
}

/// Returns the size for a range. `source` is the size of the content that is copied, 0 for none.
pub(crate) fn choose_size(range: Option<&CapacityRange>, source: u64) -> Result<u64, Status> {
    let bytes = |value: i64| u64::try_from(value).map_err(|_| invalid("a size is negative"));
    let (required, limit) = match range {
        Some(range) => (bytes(range.required_bytes)?, bytes(range.limit_bytes)?),
        None => (0, 0),
    };
    let wanted = match required {
        0 if source > 0 => source,
        0 if limit > 0 => DEFAULT_SIZE.min(limit / UNIT * UNIT),
        0 => DEFAULT_SIZE,
        required => required,
    };
    let size = wanted.max(UNIT).checked_next_multiple_of(UNIT);
    let size = size.filter(|size| i64::try_from(*size).is_ok() && (limit == 0 || *size <= limit));
    let size = size.ok_or_else(|| {
        Status::out_of_range(format!("no size between {required} and {limit} bytes is a multiple of {UNIT}"))
    })?;
    if size < source {
        return Err(Status::out_of_range(format!("{size} bytes are less than the {source} bytes of the source")));
    }
    Ok(size)
}

/// Returns true if a size is in a range.
pub(crate) fn fits(size: u64, range: Option<&CapacityRange>) -> bool {
    let within = |range: &CapacityRange| {
        let size = i64::try_from(size).unwrap_or(i64::MAX);
        size >= range.required_bytes && (range.limit_bytes == 0 || size <= range.limit_bytes)
    };
    range.is_none_or(within)
}

/// Returns the label of nodes with the driver, whose value is the node.
pub(crate) fn topology_key() -> String {
    format!("{DRIVER}/node")
}

/// Returns the topology of a node.
pub(crate) fn topology(node: &str) -> Topology {
    Topology { segments: BTreeMap::from([(topology_key(), node.to_owned())]).into_iter().collect() }
}

/// Returns the node for a volume that only one can use.
pub(crate) fn choose_node(requirement: Option<&TopologyRequirement>) -> Result<String, Status> {
    let topologies = requirement.into_iter().flat_map(|all| all.preferred.iter().chain(&all.requisite));
    let mut nodes = topologies.filter_map(|topology| topology.segments.get(&topology_key()));
    nodes.next().cloned().ok_or_else(|| Status::resource_exhausted("no node for a volume with reach=node was given"))
}

/// Returns one page of a list, and the token of the next page.
pub(crate) fn page<T>(all: Vec<T>, token: &str, length: i32) -> Result<(Vec<T>, String), Status> {
    let start = match token {
        "" => 0,
        token => token
            .parse::<usize>()
            .ok()
            .filter(|start| *start <= all.len())
            .ok_or_else(|| Status::aborted(format!("starting_token {token} is not one of this list")))?,
    };
    let length = usize::try_from(length).map_err(|_| invalid("max_entries is negative"))?;
    let end = if length == 0 { all.len() } else { all.len().min(start.saturating_add(length)) };
    let next = if end < all.len() { end.to_string() } else { String::new() };
    Ok((all.into_iter().take(end).skip(start).collect(), next))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::csi::v1::volume_capability::{AccessMode, BlockVolume, MountVolume};

    fn capability(block: bool, mode: Mode) -> VolumeCapability {
        let access = match block {
            true => AccessType::Block(BlockVolume {}),
            false => AccessType::Mount(MountVolume::default()),
        };
        VolumeCapability { access_mode: Some(AccessMode { mode: mode.into() }), access_type: Some(access) }
    }

    fn parameters(given: &[(&str, &str)]) -> Result<Parameters, Status> {
        Parameters::parse(&given.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn parameters_choose_content_and_reach() {
        let one = [capability(false, Mode::SingleNodeWriter)];
        let many = [capability(false, Mode::MultiNodeMultiWriter)];
        let block = [capability(true, Mode::MultiNodeMultiWriter)];
        for (given, capabilities, expected) in [
            (&[][..], &one, Some(Content::Directory)),
            (&[("files", "ext4")], &many, Some(Content::Ext4)),
            (&[("files", "ext4")], &block, Some(Content::Block)),
            (&[("reach", "node")], &one, Some(Content::Directory)),
            (&[("reach", "node")], &many, None),
            (&[("csi.storage.k8s.io/pv/name", "pvc-1")], &one, Some(Content::Directory)),
        ] {
            assert_eq!(parameters(given).unwrap().content(capabilities).ok(), expected, "{given:?}");
        }
        for bad in [("files", "xfs"), ("faults", "create"), ("colour", "blue")] {
            assert_eq!(parameters(&[bad]).unwrap_err().code(), tonic::Code::InvalidArgument);
        }
        let mixed = [one[0].clone(), block[0].clone()];
        assert!(parameters(&[]).unwrap().content(&mixed).is_err() && parameters(&[]).unwrap().content(&[]).is_err());
    }

    #[test]
    fn sizes_are_in_the_range_and_hold_the_source() {
        let range = |required_bytes, limit_bytes| Some(CapacityRange { required_bytes, limit_bytes });
        let mib = |count: i64| count << 20;
        for (range, source, expected) in [
            (None, 0, Some(DEFAULT_SIZE)),
            (None, 5 << 20, Some(5 << 20)),
            (range(1, 0), 0, Some(UNIT)),
            (range(mib(2) + 1, 0), 0, Some(3 << 20)),
            (range(0, mib(4) + 1), 0, Some(4 << 20)),
            (range(mib(2) + 1, mib(2) + 2), 0, None),
            (range(mib(3), mib(2)), 0, None),
            (range(mib(2), 0), 3 << 20, None),
            (range(-1, 0), 0, None),
            (range(i64::MAX, 0), 0, None),
        ] {
            let size = choose_size(range.as_ref(), source).ok();
            assert_eq!(size, expected, "{range:?} {source}");
            assert!(size.is_none_or(|size| fits(size, range.as_ref())));
        }
        assert!(!fits(1 << 20, range(mib(2), 0).as_ref()) && !fits(3 << 20, range(0, mib(2)).as_ref()));
    }

    #[test]
    fn preferred_node_is_chosen() {
        let requirement =
            TopologyRequirement { requisite: vec![topology("a"), topology("b")], preferred: vec![topology("b")] };
        assert_eq!(choose_node(Some(&requirement)).unwrap(), "b");
        assert!(choose_node(None).is_err());
    }

    #[test]
    fn lists_have_pages() {
        let page = |token, length| page(vec![1, 2, 3], token, length).ok();
        assert_eq!(page("", 0), Some((vec![1, 2, 3], String::new())));
        assert_eq!(page("", 2), Some((vec![1, 2], "2".to_owned())));
        assert_eq!(page("2", 2), Some((vec![3], String::new())));
        assert_eq!((page("4", 0), page("x", 0), page("", -1)), (None, None, None));
    }
}
