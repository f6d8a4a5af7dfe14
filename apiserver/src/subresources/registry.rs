//! All subresources, in the order of discovery. Clients find those that are not listed by their documentation.

use http::Method;

use super::{
    addvolume, backup,
    common::specification::{GROUP, Specification, Verb},
    console, evacuate_cancel, expand_spec, expand_vm_spec, filesystemlist, freeze, guestosinfo, hibernate, memorydump,
    migrate, objectgraph, pause, portforward, redefine_checkpoint, removememorydump, removevolume, reset, restart,
    sev_fetch_cert_chain, sev_inject_launch_secret, sev_query_launch_measurement, sev_setup_session, softreboot, start,
    stop, unfreeze, unpause, usage, usbredir, userlist, vnc, vnc_screenshot, vsock,
};
use crate::{auth::authorization::Attributes, metrics::StreamKind};

/// The subresources.
pub(crate) static ALL: [&Specification; 40] = [
    &expand_vm_spec::SPECIFICATION,
    &vnc::SPECIFICATION,
    &vnc_screenshot::SPECIFICATION,
    &console::SPECIFICATION,
    &portforward::OF_VMI,
    &backup::SPECIFICATION,
    &redefine_checkpoint::SPECIFICATION,
    &pause::SPECIFICATION,
    &unpause::SPECIFICATION,
    &freeze::SPECIFICATION,
    &unfreeze::SPECIFICATION,
    &reset::SPECIFICATION,
    &softreboot::SPECIFICATION,
    &start::SPECIFICATION,
    &stop::SPECIFICATION,
    &restart::SPECIFICATION,
    &migrate::SPECIFICATION,
    &expand_spec::SPECIFICATION,
    &objectgraph::OF_VM,
    &evacuate_cancel::OF_VM,
    &guestosinfo::SPECIFICATION,
    &userlist::SPECIFICATION,
    &filesystemlist::SPECIFICATION,
    &addvolume::OF_VMI,
    &removevolume::OF_VMI,
    &objectgraph::OF_VMI,
    &sev_fetch_cert_chain::SPECIFICATION,
    &sev_query_launch_measurement::SPECIFICATION,
    &sev_setup_session::SPECIFICATION,
    &sev_inject_launch_secret::SPECIFICATION,
    &evacuate_cancel::OF_VMI,
    &portforward::OF_VM,
    &addvolume::OF_VM,
    &removevolume::OF_VM,
    &memorydump::SPECIFICATION,
    &removememorydump::SPECIFICATION,
    &usbredir::SPECIFICATION,
    &vsock::SPECIFICATION,
    &usage::SPECIFICATION,
    &hibernate::SPECIFICATION,
];

/// Returns the kinds of streams, each once.
pub(crate) fn stream_kinds() -> Vec<&'static StreamKind> {
    let mut kinds: Vec<&'static StreamKind> = Vec::new();
    for kind in ALL.iter().filter_map(|known| known.stream()) {
        if !kinds.iter().any(|found| found.label == kind.label) {
            kinds.push(kind);
        }
    }
    kinds
}

/// Errors of an authorized request for an unknown subresource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotServed {
    /// 404
    NoSuchPath,
    /// 405, with the allowed method.
    WrongMethod(&'static str),
}

/// Finds the subresource of a request.
pub(crate) fn find(attributes: &Attributes, method: &Method) -> Result<&'static Specification, NotServed> {
    if attributes.group != GROUP {
        return Err(NotServed::NoSuchPath);
    }
    let found = ALL
        .into_iter()
        .find(|known| known.resource == attributes.resource && known.name == attributes.subresource)
        .filter(|known| known.versions.contains(&attributes.version.as_str()))
        .ok_or(NotServed::NoSuchPath)?;
    if found.http_method() == *method {
        return Ok(found);
    }
    Err(NotServed::WrongMethod(match found.method {
        Verb::Get => "GET",
        Verb::Put => "PUT",
    }))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn attributes(specification: &Specification, version: &str) -> Attributes {
        Attributes {
            group: GROUP.into(),
            version: version.into(),
            resource: specification.resource.into(),
            subresource: specification.name.into(),
            ..Attributes::default()
        }
    }

    #[test]
    fn names_and_operations_are_unique() {
        let names = ALL.map(Specification::full_name).into_iter().collect::<BTreeSet<_>>();
        let operations = ALL.map(|known| known.operation).into_iter().collect::<BTreeSet<_>>();
        assert_eq!((names.len(), operations.len()), (ALL.len(), ALL.len()));
        assert!(ALL.iter().all(|known| !known.operation.is_empty() && !known.description.is_empty()));
        assert_eq!(ALL.iter().filter(|known| known.listed).count(), 31);
        assert_eq!(stream_kinds().len(), 5);
    }

    #[test]
    fn each_is_found_in_both_versions_by_its_method_only() {
        for expected in ALL {
            for version in expected.versions {
                let attributes = attributes(expected, version);
                let found = find(&attributes, &expected.http_method()).map(Specification::full_name);
                assert_eq!(found, Ok(expected.full_name()));
                assert!(matches!(find(&attributes, &Method::POST), Err(NotServed::WrongMethod(_))));
            }
        }
    }

    #[test]
    fn unknown_subresources_are_not_found() {
        for (group, version, resource, subresource) in [
            (GROUP, "v2", "virtualmachines", "start"),
            ("example.com", "v1", "virtualmachines", "start"),
            (GROUP, "v1", "virtualmachines", "console"),
            (GROUP, "v1", "virtualmachineinstances", "migrate"),
            (GROUP, "v1", "virtualmachineinstances", "sev"),
        ] {
            let attributes = Attributes {
                group: group.into(),
                version: version.into(),
                resource: resource.into(),
                subresource: subresource.into(),
                ..Attributes::default()
            };
            let found = find(&attributes, &Method::PUT).map(Specification::full_name);
            assert_eq!(found, Err(NotServed::NoSuchPath), "{attributes:?}");
        }
    }

    /// Returns the subresources in the lists of the chart's roles for users, by the names of the lists.
    fn granted() -> Vec<(String, String)> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/ferrovirt/templates/rbac-users.yaml");
        let text = std::fs::read_to_string(path).unwrap();
        let quoted = |line: &str| line.split('"').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
        let mut granted = Vec::new();
        let mut range = Vec::new();
        for line in text.lines() {
            if line.starts_with("{{- range list") {
                range = quoted(line);
            } else if let Some((_, rest)) = line.split_once("(print \"") {
                let resource = rest.split('"').next().unwrap();
                let list = line.split_whitespace().nth(1).unwrap();
                granted.extend(range.iter().map(|name| (list.to_owned(), format!("{resource}{name}"))));
            } else if line.contains(":= list")
                || line.contains("concat $query (list")
                || line.contains("append (concat")
            {
                let list = line.split_whitespace().find(|word| word.starts_with('$')).unwrap_or("$screenshot");
                granted.extend(quoted(line).into_iter().map(|name| (list.to_owned(), name)));
            }
        }
        granted
    }

    #[test]
    fn roles_for_users_grant_each_subresource_by_its_method() {
        // Rights that an administrator grants; migrate has a role of its own.
        const NOT_GRANTED: [&str; 4] = [
            "virtualmachines/migrate",
            "virtualmachineinstances/vsock",
            "virtualmachineinstances/backup",
            "virtualmachineinstances/redefine-checkpoint",
        ];
        let granted = granted();
        for known in ALL {
            let name = known.full_name();
            let updates = granted.iter().any(|(list, found)| list == "$update" && *found == name);
            let reads = granted.iter().any(|(list, found)| list != "$update" && *found == name);
            let expected = !NOT_GRANTED.contains(&name.as_str());
            assert_eq!(updates, expected && known.method == Verb::Put, "update {name}");
            assert_eq!(reads, expected && known.method == Verb::Get, "get {name}");
        }
        for (_, name) in granted.iter().filter(|(list, _)| ["$update", "$query", "$streams"].contains(&list.as_str())) {
            // kube-apiserver checks the first part of a name with two parts.
            let known = ALL.iter().map(|known| known.full_name());
            assert!(known.into_iter().any(|known| known == *name || known.starts_with(&format!("{name}/"))), "{name}");
        }
    }
}
