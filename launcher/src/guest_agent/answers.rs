//! Parses answers of the guest agent. The guest controls all of this: it is bounded, and only shown.
//!
//! The commands are defined in QEMU's `qga/qapi-schema.json`.

use protocol::{
    GuestAgent, GuestAgentCommand, GuestDisk, GuestFileSystem, GuestInfo, GuestInterface, GuestLoad, GuestUser,
};
use serde::Deserialize;

/// Longest answer that is parsed, in bytes.
const ANSWER_LIMIT: usize = 1024 * 1024;
/// Longest text that is kept, in characters.
const TEXT_LIMIT: usize = 256;
/// Limits of interfaces, and of addresses of one interface.
const INTERFACE_LIMIT: usize = 32;
/// Limits of users and file systems, and of disks of one file system.
const LIST_LIMIT: usize = 256;
const DISK_LIMIT: usize = 16;
/// Limit of commands; guest agents have about sixty.
const COMMAND_LIMIT: usize = 256;

/// A query to the guest agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    /// The guest agent itself.
    Agent,
    /// The operating system.
    System,
    HostName,
    TimeZone,
    /// The network interfaces.
    Interfaces,
    /// Users that are logged in.
    Users,
    FileSystems,
    /// The load; since QEMU 10.0, and not on Windows.
    Load,
    Processors,
    /// Freeze status of the file systems.
    Freeze,
}

/// An answer of the guest agent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    /// The guest agent itself.
    Agent(GuestAgent),
    /// The operating system; host name and time zone are empty.
    System(GuestInfo),
    HostName(String),
    /// The time zone and its offset in seconds, `CET, 3600`.
    TimeZone(String),
    /// The network interfaces except loopback.
    Interfaces(Vec<GuestInterface>),
    /// Users that are logged in.
    Users(Vec<GuestUser>),
    FileSystems(Vec<GuestFileSystem>),
    Load(GuestLoad),
    /// Number of processors that the guest uses.
    Processors(u32),
    /// `frozen` or `thawed`.
    Freeze(String),
}

impl Query {
    /// Returns the name of the command.
    pub(crate) const fn command(self) -> &'static str {
        match self {
            Self::Agent => "guest-info",
            Self::System => "guest-get-osinfo",
            Self::HostName => "guest-get-host-name",
            Self::TimeZone => "guest-get-timezone",
            Self::Interfaces => "guest-network-get-interfaces",
            Self::Users => "guest-get-users",
            Self::FileSystems => "guest-get-fsinfo",
            Self::Load => "guest-get-load",
            Self::Processors => "guest-get-vcpus",
            Self::Freeze => "guest-fsfreeze-status",
        }
    }

    /// Parses an answer; `None` if it is malformed.
    pub(crate) fn read(self, answer: &str) -> Option<Answer> {
        if answer.len() > ANSWER_LIMIT {
            return None;
        }
        Some(match self {
            Self::Agent => Answer::Agent(agent(returned(answer)?)),
            Self::System => Answer::System(system(&returned(answer)?)),
            Self::HostName => Answer::HostName(text(&returned::<HostName>(answer)?.host_name)),
            Self::TimeZone => {
                let TimeZone { zone, offset } = returned(answer)?;
                Answer::TimeZone(format!("{}, {offset}", text(&zone)))
            }
            Self::Interfaces => Answer::Interfaces(interfaces(returned(answer)?)),
            Self::Users => Answer::Users(users(returned(answer)?)),
            Self::FileSystems => Answer::FileSystems(file_systems(returned(answer)?)),
            Self::Load => {
                let Load { load1m, load5m, load15m } = returned(answer)?;
                Answer::Load(GuestLoad { one_minute: load1m, five_minutes: load5m, fifteen_minutes: load15m })
            }
            Self::Processors => {
                let online = returned::<Vec<Processor>>(answer)?.into_iter().filter(|processor| processor.online);
                Answer::Processors(u32::try_from(online.count()).ok()?)
            }
            Self::Freeze => {
                let status: String = returned(answer)?;
                Answer::Freeze(["frozen", "thawed"].into_iter().find(|known| *known == status)?.to_owned())
            }
        })
    }
}

#[derive(Deserialize)]
struct Returned<T> {
    #[serde(rename = "return")]
    value: T,
}

pub(super) fn returned<'a, T: Deserialize<'a>>(answer: &'a str) -> Option<T> {
    serde_json::from_str::<Returned<T>>(answer).ok().map(|returned| returned.value)
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct GuestAgentInfo {
    version: String,
    supported_commands: Vec<Command>,
}

#[derive(Deserialize)]
struct Command {
    name: String,
    enabled: bool,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct System {
    name: String,
    kernel_release: String,
    version: String,
    pretty_name: String,
    version_id: String,
    kernel_version: String,
    machine: String,
    id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct HostName {
    host_name: String,
}

#[derive(Deserialize)]
struct Load {
    load1m: f64,
    load5m: f64,
    load15m: f64,
}

#[derive(Deserialize)]
struct Processor {
    online: bool,
}

#[derive(Deserialize)]
struct TimeZone {
    #[serde(default)]
    zone: String,
    offset: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Interface {
    name: String,
    #[serde(default)]
    hardware_address: String,
    #[serde(default)]
    ip_addresses: Vec<Address>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Address {
    ip_address: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct User {
    user: String,
    #[serde(default)]
    domain: String,
    #[serde(default)]
    login_time: f64,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct FileSystem {
    name: String,
    mountpoint: String,
    #[serde(rename = "type")]
    kind: String,
    used_bytes: u64,
    total_bytes: u64,
    disk: Vec<Disk>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Disk {
    serial: String,
    bus_type: String,
}

fn text(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(TEXT_LIMIT).collect()
}

fn agent(info: GuestAgentInfo) -> GuestAgent {
    let commands = info
        .supported_commands
        .into_iter()
        .take(COMMAND_LIMIT)
        .map(|command| GuestAgentCommand { name: text(&command.name), enabled: command.enabled })
        .collect();
    GuestAgent { version: text(&info.version), commands }
}

fn system(system: &System) -> GuestInfo {
    GuestInfo {
        name: text(&system.name),
        kernel_release: text(&system.kernel_release),
        version: text(&system.version),
        pretty_name: text(&system.pretty_name),
        version_id: text(&system.version_id),
        kernel_version: text(&system.kernel_version),
        machine: text(&system.machine),
        id: text(&system.id),
        ..GuestInfo::default()
    }
}

fn interfaces(list: Vec<Interface>) -> Vec<GuestInterface> {
    list.into_iter()
        .filter(|interface| interface.name != "lo")
        .take(INTERFACE_LIMIT)
        .map(|interface| GuestInterface {
            name: text(&interface.name),
            mac: text(&interface.hardware_address),
            addresses: interface
                .ip_addresses
                .into_iter()
                .filter(|address| address.ip_address.parse::<std::net::IpAddr>().is_ok())
                .take(INTERFACE_LIMIT)
                .map(|address| address.ip_address)
                .collect(),
        })
        .collect()
}

fn users(list: Vec<User>) -> Vec<GuestUser> {
    list.into_iter()
        .take(LIST_LIMIT)
        .map(|user| GuestUser {
            name: text(&user.user),
            domain: text(&user.domain),
            // JSON cannot hold numbers that are not finite.
            login_time: if user.login_time.is_finite() { user.login_time } else { 0.0 },
        })
        .collect()
}

fn file_systems(list: Vec<FileSystem>) -> Vec<GuestFileSystem> {
    // The root is the last one.
    let beyond = list.len().saturating_sub(LIST_LIMIT);
    list.into_iter()
        .skip(beyond)
        .map(|system| GuestFileSystem {
            name: text(&system.name),
            mount_point: text(&system.mountpoint),
            r#type: text(&system.kind),
            used_bytes: system.used_bytes,
            total_bytes: system.total_bytes,
            disks: system
                .disk
                .into_iter()
                .take(DISK_LIMIT)
                .map(|disk| GuestDisk { serial: text(&disk.serial), bus_type: text(&disk.bus_type) })
                .collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_a_debian_guest_are_read() {
        let answer = Query::Agent.read(
            r#"{"return":{"version":"10.0.2","supported_commands":[
                {"enabled":true,"name":"guest-ping","success-response":true},
                {"enabled":false,"name":"guest-exec","success-response":true}]}}"#,
        );
        let Some(Answer::Agent(agent)) = answer else { panic!("{answer:?}") };
        assert_eq!(agent.version, "10.0.2");
        assert_eq!(agent.commands.len(), 2);
        assert!(agent.commands[0].enabled && !agent.commands[1].enabled);

        let answer = Query::System.read(
            r#"{"return":{"name":"Debian GNU/Linux","kernel-release":"6.12.9","version":"13 (trixie)","id":"debian",
                "pretty-name":"Debian GNU/Linux 13","version-id":"13","kernel-version":"SMP","machine":"x86_64"}}"#,
        );
        let Some(Answer::System(system)) = answer else { panic!("{answer:?}") };
        assert_eq!((system.id.as_str(), system.kernel_release.as_str()), ("debian", "6.12.9"));

        assert_eq!(Query::HostName.read(r#"{"return":{"host-name":"a\u0007b"}}"#), Some(Answer::HostName("ab".into())));
        assert_eq!(
            Query::TimeZone.read(r#"{"return":{"zone":"EST","offset":-18000}}"#),
            Some(Answer::TimeZone("EST, -18000".into()))
        );
        assert_eq!(Query::Freeze.read(r#"{"return":"frozen"}"#), Some(Answer::Freeze("frozen".into())));

        let answer = Query::Users.read(r#"{"return":[{"login-time":1714000000.5,"user":"root"}]}"#);
        let expected = GuestUser { name: "root".into(), domain: String::new(), login_time: 1_714_000_000.5 };
        assert_eq!(answer, Some(Answer::Users(vec![expected])));

        let answer = Query::Load.read(r#"{"return":{"load1m":0.25,"load15m":1,"load5m":0.5}}"#);
        let expected = GuestLoad { one_minute: 0.25, five_minutes: 0.5, fifteen_minutes: 1.0 };
        assert_eq!(answer, Some(Answer::Load(expected)));

        let answer = Query::Processors
            .read(r#"{"return":[{"online":true,"can-offline":false,"logical-id":0},{"online":false,"logical-id":1}]}"#);
        assert_eq!(answer, Some(Answer::Processors(1)));

        let answer = Query::FileSystems.read(
            r#"{"return":[{"name":"vda1","total-bytes":3000,"mountpoint":"/","used-bytes":1000,"type":"ext4",
                "disk":[{"bus-type":"virtio","bus":0,"unit":0,"target":0,"serial":"s1",
                "pci-controller":{"bus":7,"slot":0,"domain":0,"function":0},"dev":"/dev/vda1"}]}]}"#,
        );
        let Some(Answer::FileSystems(systems)) = answer else { panic!("{answer:?}") };
        assert_eq!((systems[0].mount_point.as_str(), systems[0].used_bytes, systems[0].total_bytes), ("/", 1000, 3000));
        assert_eq!(systems[0].disks, [GuestDisk { serial: "s1".into(), bus_type: "virtio".into() }]);
    }

    #[test]
    fn loopback_is_left_out_and_addresses_are_kept_if_they_are_addresses() {
        let answer = Query::Interfaces.read(
            r#"{"return":[{"name":"lo","ip-addresses":[{"ip-address-type":"ipv4","ip-address":"127.0.0.1","prefix":8}]},
                {"name":"eth0","hardware-address":"02:00:00:00:00:01","ip-addresses":[
                {"ip-address-type":"ipv4","ip-address":"10.0.2.2","prefix":24},{"ip-address":"not an address"}]}]}"#,
        );
        let Some(Answer::Interfaces(interfaces)) = answer else { panic!("{answer:?}") };
        assert_eq!(interfaces.len(), 1);
        assert_eq!(interfaces[0].addresses, ["10.0.2.2"]);
    }

    #[test]
    fn a_guest_cannot_make_the_lists_or_texts_long() {
        let many = |item: &str| format!(r#"{{"return":[{}]}}"#, vec![item; 5000].join(","));
        let Some(Answer::Users(users)) = Query::Users.read(&many(r#"{"user":"u"}"#)) else { panic!() };
        assert_eq!(users.len(), LIST_LIMIT);
        let Some(Answer::FileSystems(systems)) = Query::FileSystems.read(&many(r#"{"name":"n"}"#)) else { panic!() };
        assert_eq!(systems.len(), LIST_LIMIT);
        let Some(Answer::Interfaces(list)) = Query::Interfaces.read(&many(r#"{"name":"n"}"#)) else { panic!() };
        assert_eq!(list.len(), INTERFACE_LIMIT);
        let long = format!(r#"{{"return":{{"host-name":"{}"}}}}"#, "x".repeat(5000));
        assert_eq!(Query::HostName.read(&long), Some(Answer::HostName("x".repeat(TEXT_LIMIT))));
        assert_eq!(Query::HostName.read(&long.replace("xx", &"y".repeat(5000))), None, "beyond the limit");
    }

    #[test]
    fn rubbish_is_no_answer() {
        for answer in ["", "{}", "null", r#"{"return":7}"#, r#"{"error":{"class":"CommandNotFound"}}"#, r#"{"return":"#]
        {
            for query in [Query::Agent, Query::System, Query::Users, Query::FileSystems, Query::Load, Query::Freeze] {
                assert_eq!(query.read(answer), None, "{query:?} {answer}");
            }
        }
        assert_eq!(Query::Freeze.read(r#"{"return":"melting"}"#), None);
    }
}
