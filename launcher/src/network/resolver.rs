//! The pod's resolver configuration, for the guest's DHCP lease.

use std::{
    io::Read,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

/// Limit of resolv.conf, in bytes.
const SIZE_LIMIT: u64 = 64 * 1024;
/// Limits of name servers and of search domains.
const LIST_LIMIT: usize = 16;

/// Content of resolv.conf.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resolver {
    /// Name servers with IPv4 addresses.
    pub(crate) servers: Vec<Ipv4Addr>,
    /// Name servers with IPv6 addresses.
    pub(crate) servers6: Vec<Ipv6Addr>,
    /// Search domains.
    pub(crate) search: Vec<String>,
}

impl Resolver {
    /// Reads a resolv.conf. An unreadable file counts as empty: the guest then has no name server, like the pod.
    pub(crate) fn read(path: &Path) -> Self {
        let mut text = String::new();
        match std::fs::File::open(path).and_then(|file| file.take(SIZE_LIMIT).read_to_string(&mut text)) {
            Ok(_) => Self::parse(&text),
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "cannot read the resolver configuration");
                Self::default()
            }
        }
    }

    /// Parses a resolv.conf.
    pub(crate) fn parse(text: &str) -> Self {
        let mut resolver = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => match words.next().and_then(|word| word.parse::<IpAddr>().ok()) {
                    Some(IpAddr::V4(address)) if resolver.servers.len() < LIST_LIMIT => {
                        resolver.servers.push(address);
                    }
                    Some(IpAddr::V6(address)) if resolver.servers6.len() < LIST_LIMIT => {
                        resolver.servers6.push(address);
                    }
                    _ => {}
                },
                // The last search line wins, as in the C library.
                Some("search" | "domain") => {
                    resolver.search = words
                        .map(|word| word.trim_end_matches('.').to_owned())
                        .filter(|word| is_domain(word))
                        .take(LIST_LIMIT)
                        .collect();
                }
                _ => {}
            }
        }
        resolver
    }

    /// Returns the guest's domain: the longest search domain, the first of several.
    pub(crate) fn domain(&self) -> Option<&str> {
        self.search.iter().rev().map(String::as_str).max_by_key(|domain| domain.len())
    }

    /// Prepends the domain of a VMI with a subdomain to the search list, unless the pod has it already. It belongs to the longest
    /// domain of services: only services give subdomains a name, and other domains come from `dnsConfig` or the node.
    pub(crate) fn with_subdomain(mut self, subdomain: Option<&str>) -> Self {
        let services = self.search.iter().rev().filter(|domain| domain.contains(".svc."));
        if let (Some(subdomain), Some(domain)) =
            (subdomain.filter(|name| is_domain(name)), services.max_by_key(|domain| domain.len()))
        {
            let full = format!("{subdomain}.{domain}");
            // A namespace may have the name of the subdomain.
            let is_known =
                domain.strip_prefix(subdomain).is_some_and(|rest| rest.starts_with('.') && !rest.starts_with(".svc."));
            if !is_known && is_domain(&full) {
                self.search.insert(0, full);
            }
        }
        self
    }
}

fn is_domain(name: &str) -> bool {
    name.len() <= 253
        && name.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_and_search_of_a_pod_are_read() {
        let resolver = Resolver::parse(
            "# pod\nsearch default.svc.cluster.local svc.cluster.local. bad..name\nnameserver 10.96.0.10\n\
             nameserver fd00::1\noptions ndots:5\n",
        );
        assert_eq!(resolver.servers, [Ipv4Addr::new(10, 96, 0, 10)]);
        assert_eq!(resolver.servers6, ["fd00::1".parse::<Ipv6Addr>().unwrap()]);
        assert_eq!(resolver.search, ["default.svc.cluster.local", "svc.cluster.local"]);
        assert_eq!(resolver.domain(), Some("default.svc.cluster.local"));
        let alike = Resolver::parse("search corp.example net.example dev.example.org lab.example.org\n");
        assert_eq!(alike.domain(), Some("dev.example.org"));
    }

    #[test]
    fn a_subdomain_of_services_comes_first() {
        for (search, expected) in [
            ("a.svc.cluster.local", "web.a.svc.cluster.local a.svc.cluster.local"),
            (
                "svc.cluster.local a.svc.cluster.local a.very.long.domain.of.the.node",
                "web.a.svc.cluster.local svc.cluster.local a.svc.cluster.local a.very.long.domain.of.the.node",
            ),
            ("web.a.svc.cluster.local a.svc.cluster.local", "web.a.svc.cluster.local a.svc.cluster.local"),
            ("webs.svc.cluster.local", "web.webs.svc.cluster.local webs.svc.cluster.local"),
            ("web.svc.cluster.local", "web.web.svc.cluster.local web.svc.cluster.local"),
            ("example.com", "example.com"),
            ("", ""),
        ] {
            let resolver = Resolver::parse(&format!("search {search}\n")).with_subdomain(Some("web"));
            assert_eq!(resolver.search.join(" "), expected, "{search}");
        }
    }
}
