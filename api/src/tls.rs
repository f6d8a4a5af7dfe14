//! Names of the installation's certificates. virt-controller creates them, and every process verifies them.

/// Secret with certificate and key of the CA.
pub const CA_SECRET: &str = "kubevirt-ca";
/// ConfigMap with the certificates of all CAs still in use.
pub const CA_CONFIG_MAP: &str = "kubevirt-ca";
/// Key of the bundle in [`CA_CONFIG_MAP`].
pub const CA_BUNDLE_KEY: &str = "ca-bundle";
/// Secret with virt-api's server certificate.
pub const API_SERVER_SECRET: &str = "kubevirt-virt-api-certs";
/// Secret with virt-api's client certificate for virt-handler.
pub const API_CLIENT_SECRET: &str = "kubevirt-api-client-certs";
/// Secret with the certificate of virt-controller's metrics server.
pub const CONTROLLER_SECRET: &str = "kubevirt-controller-certs";
/// Key of the certificate chain in a secret, PEM.
pub const CERT_KEY: &str = "tls.crt";
/// Key of the private key in a secret, PEM.
pub const KEY_KEY: &str = "tls.key";

/// Common name of the CA, or its prefix; a generation may follow.
pub const CA_CN: &str = "kubevirt.io";
/// Common name that virt-handler requires of its clients.
pub const API_CLIENT_CN: &str = "kubevirt.io:system:client:virt-api";
/// Common name of virt-controller's certificate.
pub const CONTROLLER_CN: &str = "kubevirt.io:system:virt-controller";
/// Common name of every virt-handler's certificate; its DNS name contains the node.
pub const HANDLER_CN: &str = "kubevirt.io:system:node:virt-handler";
/// Common name of virt-handler's certificate for connections to guests over VSOCK; its DNS name contains the node, too.
pub const GUEST_CLIENT_CN: &str = "kubevirt.io:system:client:vsock";

/// Signer of certificate signing requests for virt-handler.
pub const HANDLER_SIGNER: &str = "kubevirt.io/virt-handler";
/// Key in `spec.extra` of a signing request with the node to which the requester's token is bound.
pub const NODE_NAME_EXTRA: &str = "authentication.kubernetes.io/node-name";

/// Service of virt-api.
pub const API_SERVICE: &str = "virt-api";
/// APIServices with the CA bundle.
pub const API_SERVICES: [&str; 2] = ["v1.subresources.kubevirt.io", "v1alpha3.subresources.kubevirt.io"];
/// Mutating webhook configuration with the CA bundle.
pub const MUTATING_WEBHOOKS: &str = "virt-api-mutator";
/// Validating webhook configurations with the CA bundle.
pub const VALIDATING_WEBHOOKS: [&str; 2] = ["virt-api-validator", "virt-operator-validator"];

/// Returns the DNS names of virt-api's server certificate for an installation in `namespace`.
pub fn api_server_names(namespace: &str) -> [String; 4] {
    [
        API_SERVICE.to_owned(),
        format!("{API_SERVICE}.{namespace}"),
        format!("{API_SERVICE}.{namespace}.svc"),
        format!("{API_SERVICE}.{namespace}.svc.cluster.local"),
    ]
}

/// Returns the common name of virt-api's server certificate for an installation in `namespace`.
pub fn api_server_cn(namespace: &str) -> String {
    format!("{API_SERVICE}.{namespace}.pod.cluster.local")
}

const HANDLER_DOMAIN: &str = ".virt-handler";
const DNS_NAME_MAX: usize = 253;

/// Returns the DNS name in the certificate of `node`'s virt-handler: `<node>.virt-handler`, shortened with a hash if it is too
/// long for a DNS name.
pub fn handler_server_name(node: &str) -> String {
    let room = DNS_NAME_MAX - HANDLER_DOMAIN.len();
    if node.len() <= room {
        return format!("{node}{HANDLER_DOMAIN}");
    }
    let hash = format!("-{:08x}", fnv1a32(node.as_bytes()));
    let mut cut = room - hash.len();
    while !node.is_char_boundary(cut) {
        cut -= 1;
    }
    let start = node[..cut].trim_end_matches(['.', '-']);
    format!("{start}{hash}{HANDLER_DOMAIN}")
}

/// Returns the FNV-1a hash (32 bits).
fn fnv1a32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Returns the name of the certificate signing request of `node`'s virt-handler; `random` makes it unique.
pub fn handler_request_name(node: &str, random: &str) -> String {
    format!("virt-handler-{}-{random}", node.get(..200).unwrap_or(node))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_is_the_published_one() {
        assert_eq!(fnv1a32(b""), 0x811c_9dc5);
        assert_eq!(fnv1a32(b"a"), 0xe40c_292c);
    }

    #[test]
    fn handler_name_carries_the_node() {
        assert_eq!(handler_server_name("node-1.example"), "node-1.example.virt-handler");
    }

    #[test]
    fn long_node_names_stay_distinct_and_valid() {
        let one = handler_server_name(&format!("{}a", "n".repeat(252)));
        let two = handler_server_name(&format!("{}b", "n".repeat(252)));
        assert_ne!(one, two);
        assert!(one.len() <= DNS_NAME_MAX);
        assert!(one.ends_with(".virt-handler"));
    }
}
