//! The messages and the service, generated from `proto/launcher.proto`.

tonic::include_proto!("ferrovirt.launcher.v1");

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    /// Parts of field names that identify an object.
    const NAMES: [&str; 9] = ["uid", "uuid", "namespace", "vmi", "vm", "pod", "node", "owner", "identity"];

    /// Type and name of each field.
    type Fields<'p> = Vec<(&'p str, &'p str)>;

    fn field(text: &str) -> Option<(&str, &str)> {
        let mut words = text.split('=').next()?.split_whitespace().rev();
        let name = words.next()?;
        Some((words.next()?, name))
    }

    fn fields(body: &str) -> Fields<'_> {
        let body = body.split('}').next().unwrap_or_default();
        let lines = body.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        lines.flat_map(|line| line.split(';')).filter_map(field).collect()
    }

    fn messages(proto: &str) -> BTreeMap<&str, Fields<'_>> {
        let texts = proto.split("\nmessage ").skip(1);
        texts.filter_map(|text| text.split_once('{')).map(|(name, body)| (name.trim(), fields(body))).collect()
    }

    /// Returns all messages that a launcher sends: the responses of calls and the messages in them.
    fn sent<'p>(proto: &'p str, messages: &BTreeMap<&'p str, Fields<'p>>) -> BTreeSet<&'p str> {
        let returned = |line: &'p str| {
            let returned = line.trim().strip_prefix("rpc ")?.split_once("returns (")?.1;
            Some(returned.split(')').next()?.trim_start_matches("stream "))
        };
        let mut open: Vec<&str> = proto.lines().filter_map(returned).collect();
        let mut sent = BTreeSet::new();
        while let Some(message) = open.pop() {
            if sent.insert(message) {
                let kinds = messages[message].iter().map(|(kind, _)| *kind);
                open.extend(kinds.filter(|kind| messages.contains_key(kind)));
            }
        }
        sent
    }

    /// virt-handler knows the VMI from the socket. No message from a launcher may identify one.
    #[test]
    fn cve_2026_13208_no_reply_of_a_launcher_can_name_a_vmi() {
        let proto = include_str!("../proto/launcher.proto");
        let messages = messages(proto);
        let sent = sent(proto, &messages);
        for known in ["HelloReply", "LauncherState", "GuestReportReply", "StatsReply", "GuestDisk", "Chunk", "Done"] {
            assert!(sent.contains(known), "{known} was not found: {sent:?}");
        }
        assert!(!sent.contains("HelloRequest"), "{sent:?}");
        for message in sent {
            for (_, field) in &messages[message] {
                let named = field.split('_').any(|word| NAMES.contains(&word));
                assert!(!named, "{message} has the field {field}");
            }
        }
    }
}
