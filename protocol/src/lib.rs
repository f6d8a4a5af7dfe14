//! The protocol between virt-handler and virt-launcher, generated from `proto/launcher.proto`.
#![allow(missing_docs, reason = "generated from the proto file, which holds the documentation")]
#![allow(clippy::doc_markdown, clippy::all, reason = "generated code")]

tonic::include_proto!("ferrovirt.launcher.v1");

/// Largest message that either side accepts, in bytes. etcd limits a VirtualMachineInstance to 1.5 MiB. The capabilities cache
/// of a node has a few hundred KiB.
pub const MAX_MESSAGE_SIZE: usize = 8 * 1024 * 1024;
/// Largest chunk of a stream, in bytes.
pub const MAX_CHUNK: usize = 32 * 1024;

#[cfg(test)]
mod tests {
    /// virt-handler knows the VMI from the socket. No message from a launcher may identify one.
    #[test]
    fn cve_2026_13208_launcher_messages_identify_no_vmi() {
        let proto = include_str!("../proto/launcher.proto");
        let messages = ["HelloReply", "SyncReply", "MachineState", "GuestReportReply", "StatsReply", "Done", "Chunk"];
        let mut seen = 0;
        for message in
            proto.split("\nmessage ").filter(|text| messages.iter().any(|name| text.starts_with(&format!("{name} "))))
        {
            seen += 1;
            let fields = message.split('}').next().unwrap_or_default();
            for word in [" uid ", " namespace ", " vmi ", " pod ", " node "] {
                let named = fields.lines().any(|line| !line.trim().starts_with("//") && line.contains(word));
                assert!(!named, "{message}");
            }
        }
        assert!(seen >= 4, "{seen} messages were found");
    }
}
