//! Certificate authorities of the cluster, and the certificates that they sign.

use std::{
    fs,
    io::Write,
    net::IpAddr,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

use crate::{
    error::{Error, FileContext, Result},
    plan::{CLUSTER_DOMAIN, Node, Plan},
};

/// Validity of certificates. A test cluster is removed earlier.
const VALIDITY: Duration = Duration::from_secs(365 * 24 * 3600);
/// Tolerated difference between clocks.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// Subject and purpose of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The common name: the user name, for client certificates.
    pub common_name: String,
    /// The organization: the group, for client certificates.
    pub organization: Option<String>,
    /// DNS names and addresses, for server certificates.
    pub names: Vec<String>,
    /// Allows use by a client.
    pub client: bool,
}

impl Subject {
    fn client(common_name: impl Into<String>, organization: Option<&str>) -> Self {
        Self {
            common_name: common_name.into(),
            organization: organization.map(str::to_owned),
            names: Vec::new(),
            client: true,
        }
    }

    fn server(common_name: impl Into<String>, names: Vec<String>) -> Self {
        Self { common_name: common_name.into(), organization: None, names, client: false }
    }
}

/// Name in the API server's client certificate for kubelets. The bootstrap manifest binds it to a role.
pub const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";
/// User name of the DNS server. The bootstrap manifest binds it to a role.
pub const DNS_USER: &str = "system:coredns";
/// User name of Multus on nodes. The bootstrap manifest binds it to a role.
pub const NETWORKS_USER: &str = "multus";
/// User name of provisioner, resizer and snapshotters. The bootstrap manifest binds it to a role.
pub const STORAGE_USER: &str = "csi-sidecars";
/// Name of the front proxy, the only one that aggregated API servers accept.
pub const FRONT_PROXY_CLIENT: &str = "front-proxy-client";

/// Returns file name (without extension) and subject of each control plane certificate that the cluster CA signs.
#[must_use]
pub fn control_plane_subjects(plan: &Plan) -> Vec<(&'static str, Subject)> {
    let api_names = vec![
        "kubernetes".into(),
        "kubernetes.default".into(),
        "kubernetes.default.svc".into(),
        format!("kubernetes.default.svc.{CLUSTER_DOMAIN}"),
        "localhost".into(),
        "127.0.0.1".into(),
        plan.api_service_address().to_string(),
        plan.control_address().to_string(),
    ];
    vec![
        ("apiserver", Subject::server("kube-apiserver", api_names)),
        ("apiserver-kubelet-client", Subject::client(KUBELET_CLIENT, None)),
        ("admin", Subject::client("ferrovirt-admin", Some("system:masters"))),
        ("controller-manager", Subject::client("system:kube-controller-manager", None)),
        ("scheduler", Subject::client("system:kube-scheduler", None)),
        ("proxy", Subject::client("system:kube-proxy", None)),
        ("networks", Subject::client(NETWORKS_USER, None)),
        ("dns", Subject::client(DNS_USER, None)),
        ("storage", Subject::client(STORAGE_USER, None)),
    ]
}

/// Returns file name (without extension) and subject of each certificate of a node.
#[must_use]
pub fn node_subjects(node: &Node) -> Vec<(&'static str, Subject)> {
    vec![
        ("kubelet-client", Subject::client(format!("system:node:{}", node.name), Some("system:nodes"))),
        ("kubelet-server", Subject::server(node.name.clone(), vec![node.name.clone(), node.address.to_string()])),
    ]
}

/// A certificate authority that can sign.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    now: SystemTime,
}

impl Authority {
    /// Creates an authority and returns it with its certificate and key in PEM.
    ///
    /// # Errors
    /// Fails if the key cannot be generated.
    pub fn create(name: &str, now: SystemTime) -> Result<(Self, Pair)> {
        let wrap = |source| Error::Certificate { subject: name.to_owned(), source };
        let key = KeyPair::generate().map_err(wrap)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = distinguished_name(name, None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        set_validity(&mut params, now);
        let certificate = params.self_signed(&key).map_err(wrap)?;
        let pair = Pair { certificate: certificate.pem(), key: key.serialize_pem() };
        Ok((Self { issuer: Issuer::new(params, key), now }, pair))
    }

    /// Loads an authority from its PEM files.
    ///
    /// # Errors
    /// Fails if the files cannot be read or parsed.
    pub fn load(folder: &Path, name: &str, now: SystemTime) -> Result<Self> {
        let wrap = |source| Error::Certificate { subject: name.to_owned(), source };
        let (certificate, key) = (folder.join(format!("{name}.crt")), folder.join(format!("{name}.key")));
        let certificate = fs::read_to_string(&certificate).at("read", certificate)?;
        let key = KeyPair::from_pem(&fs::read_to_string(&key).at("read", key)?).map_err(wrap)?;
        let issuer = Issuer::from_ca_cert_pem(&certificate, key).map_err(wrap)?;
        Ok(Self { issuer, now })
    }

    /// Generates a key and signs a certificate for it.
    ///
    /// # Errors
    /// Fails if a name is invalid or the key cannot be generated.
    pub fn sign(&self, subject: &Subject) -> Result<Pair> {
        let wrap = |source| Error::Certificate { subject: subject.common_name.clone(), source };
        let key = KeyPair::generate().map_err(wrap)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = distinguished_name(&subject.common_name, subject.organization.as_deref());
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![if subject.client {
            ExtendedKeyUsagePurpose::ClientAuth
        } else {
            ExtendedKeyUsagePurpose::ServerAuth
        }];
        params.subject_alt_names = subject
            .names
            .iter()
            .map(|name| match name.parse::<IpAddr>() {
                Ok(address) => Ok(SanType::IpAddress(address)),
                Err(_) => name.as_str().try_into().map(SanType::DnsName),
            })
            .collect::<std::result::Result<_, _>>()
            .map_err(wrap)?;
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, self.now);
        let certificate = params.signed_by(&key, &self.issuer).map_err(wrap)?;
        Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

fn distinguished_name(common_name: &str, organization: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(organization) = organization {
        name.push(DnType::OrganizationName, organization);
    }
    name.push(DnType::CommonName, common_name);
    name
}

fn set_validity(params: &mut CertificateParams, now: SystemTime) {
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + VALIDITY).into();
}

/// A certificate and its key, in PEM.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The certificate.
    pub certificate: String,
    /// The private key.
    pub key: String,
}

impl Pair {
    /// Writes `NAME.crt` and `NAME.key`.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub fn write(&self, folder: &Path, name: &str) -> Result<()> {
        let certificate = folder.join(format!("{name}.crt"));
        fs::write(&certificate, &self.certificate).at("write", certificate)?;
        write_private(&folder.join(format!("{name}.key")), &self.key)
    }

    /// Reads `NAME.crt` and `NAME.key`.
    ///
    /// # Errors
    /// Fails if a file cannot be read.
    pub fn read(folder: &Path, name: &str) -> Result<Self> {
        let read = |ending: &str| -> Result<String> {
            let path: PathBuf = folder.join(format!("{name}.{ending}"));
            fs::read_to_string(&path).at("read", path)
        };
        Ok(Self { certificate: read("crt")?, key: read("key")? })
    }
}

/// Writes a file that only its owner can read.
///
/// # Errors
/// Fails if it cannot be written.
pub fn write_private(path: &Path, content: &str) -> Result<()> {
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path).at("create", path)?;
    file.write_all(content.as_bytes()).at("write", path)
}

/// Creates all keys and certificates of the control plane in the plan's folder.
///
/// # Errors
/// Fails if a key cannot be generated or a file cannot be written.
pub fn write_control_plane(plan: &Plan, now: SystemTime) -> Result<()> {
    let folder = plan.pki();
    fs::create_dir_all(&folder).at("create", &folder)?;
    let (authority, pair) = Authority::create("ferrovirt-cluster-ca", now)?;
    pair.write(&folder, "ca")?;
    for (name, subject) in control_plane_subjects(plan) {
        authority.sign(&subject)?.write(&folder, name)?;
    }
    let (front_proxy, pair) = Authority::create("ferrovirt-front-proxy-ca", now)?;
    pair.write(&folder, "front-proxy-ca")?;
    front_proxy.sign(&Subject::client(FRONT_PROXY_CLIENT, None))?.write(&folder, "front-proxy-client")?;
    let wrap = |source| Error::Certificate { subject: "service accounts".into(), source };
    let key = KeyPair::generate().map_err(wrap)?;
    write_private(&folder.join("service-accounts.key"), &key.serialize_pem())?;
    let public = folder.join("service-accounts.pub");
    fs::write(&public, key.public_key_pem()).at("write", public)
}

/// Creates the certificates of a node in a folder, with that of the authority.
///
/// # Errors
/// Fails if the authority cannot be read, a key cannot be generated or a file cannot be written.
pub fn write_node(plan: &Plan, node: &Node, folder: &Path, now: SystemTime) -> Result<()> {
    let authority = Authority::load(&plan.pki(), "ca", now)?;
    for (name, subject) in node_subjects(node) {
        authority.sign(&subject)?.write(folder, name)?;
    }
    let certificate = plan.pki().join("ca.crt");
    fs::copy(&certificate, folder.join("ca.crt")).at("copy", certificate).map(drop)
}

#[cfg(test)]
mod tests {
    use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

    use super::*;

    fn der(pem: &str) -> Vec<u8> {
        x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap().1.contents
    }

    fn plan() -> Plan {
        Plan::new(PathBuf::from("/src"), 0).unwrap()
    }

    #[test]
    fn client_certificate_carries_user_group_and_only_client_use() {
        let (authority, ca) = Authority::create("test-ca", SystemTime::now()).unwrap();
        let node = plan().node(1);
        let (_, subject) = node_subjects(&node).remove(0);
        let der = der(&authority.sign(&subject).unwrap().certificate);
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(certificate.subject().to_string(), "O=system:nodes, CN=system:node:node-1");
        let usage = certificate.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.client_auth && !usage.server_auth);
        let ca_der = self::der(&ca.certificate);
        let (_, ca) = X509Certificate::from_der(&ca_der).unwrap();
        certificate.verify_signature(Some(ca.public_key())).unwrap();
        assert!(ca.is_ca() && !certificate.is_ca());
        assert!(certificate.validity().is_valid());
    }

    #[test]
    fn api_server_certificate_names_service_address_and_control_address() {
        let (authority, _) = Authority::create("test-ca", SystemTime::now()).unwrap();
        let subjects = control_plane_subjects(&plan());
        let (_, subject) = subjects.iter().find(|(name, _)| *name == "apiserver").unwrap();
        let der = der(&authority.sign(subject).unwrap().certificate);
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        let names = &certificate.subject_alternative_name().unwrap().unwrap().value.general_names;
        for address in [plan().api_service_address(), plan().control_address()] {
            assert!(names.contains(&GeneralName::IPAddress(&address.octets())), "{address}");
        }
        assert!(names.contains(&GeneralName::DNSName("kubernetes.default.svc.cluster.local")));
        assert!(certificate.extended_key_usage().unwrap().unwrap().value.server_auth);
    }

    #[test]
    fn only_the_administrator_is_a_master() {
        let masters: Vec<_> = control_plane_subjects(&plan())
            .into_iter()
            .filter(|(_, subject)| subject.organization.as_deref() == Some("system:masters"))
            .map(|(name, _)| name)
            .collect();
        assert_eq!(masters, ["admin"]);
    }

    #[test]
    fn authority_read_back_from_files_signs_for_the_same_root() {
        let folder = std::env::temp_dir().join(format!("ferrovirt-pki-{}", std::process::id()));
        let plan = Plan::new(folder.clone(), 0).unwrap();
        write_control_plane(&plan, SystemTime::now()).unwrap();
        let node = plan.node(1);
        fs::create_dir_all(&node.folder).unwrap();
        write_node(&plan, &node, &node.folder, SystemTime::now()).unwrap();
        let ca_der = der(&Pair::read(&plan.pki(), "ca").unwrap().certificate);
        let (_, ca) = X509Certificate::from_der(&ca_der).unwrap();
        let der = der(&Pair::read(&node.folder, "kubelet-server").unwrap().certificate);
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        certificate.verify_signature(Some(ca.public_key())).unwrap();
        fs::remove_dir_all(folder).unwrap();
    }
}
