//! Connection to the cluster: kubectl's connection flags, the kubeconfig and the client built from both.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use http::Uri;
use kube::config::KubeConfigOptions;

use crate::{
    Error, kubeconfig,
    option_value::{server, time_limit},
    proxy,
};

/// Verbosity that logs the commands this program runs.
pub(crate) const VERBOSITY_COMMANDS: u8 = 3;
/// Verbosity that makes those commands log too.
pub(crate) const VERBOSITY_COMMAND_OUTPUT: u8 = 4;

/// Connection flags that kubectl defines and plugins are expected to accept.
#[derive(Args, Default)]
#[command(next_help_heading = "Global options")]
pub(crate) struct ClusterOptions {
    /// Path to the kubeconfig file to use
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The name of the kubeconfig context to use
    #[arg(long, global = true)]
    pub context: Option<String>,
    /// The name of the kubeconfig cluster to use
    #[arg(long, global = true)]
    pub cluster: Option<String>,
    /// The name of the kubeconfig user to use
    #[arg(long, global = true)]
    pub user: Option<String>,
    /// The namespace of the VM or VMI; default: that of the context
    #[arg(long, short, global = true)]
    pub namespace: Option<String>,
    /// Address and port of the API server; overrides the kubeconfig
    #[arg(long, short, global = true, value_name = "URL", value_parser = server)]
    pub server: Option<Uri>,
    /// File with the certificate authorities that the API server's certificate is checked against
    #[arg(long, global = true, value_name = "FILE")]
    pub certificate_authority: Option<PathBuf>,
    /// Name expected in the API server's certificate; default: the host of its address
    #[arg(long, global = true, value_name = "NAME")]
    pub tls_server_name: Option<String>,
    /// Do not check the API server's certificate. This makes the connection insecure
    #[arg(long, global = true)]
    pub insecure_skip_tls_verify: bool,
    /// Bearer token for authentication
    #[arg(long, global = true)]
    pub token: Option<String>,
    /// File with the client certificate
    #[arg(long, global = true, value_name = "FILE")]
    pub client_certificate: Option<String>,
    /// File with the key of the client certificate
    #[arg(long, global = true, value_name = "FILE")]
    pub client_key: Option<String>,
    /// Username to impersonate for the operation
    #[arg(long = "as", global = true, value_name = "USER")]
    pub impersonate: Option<String>,
    /// Group to impersonate for the operation, can be repeated
    #[arg(long = "as-group", global = true, value_name = "GROUP")]
    pub impersonate_groups: Vec<String>,
    /// UID to impersonate for the operation
    #[arg(long = "as-uid", global = true, value_name = "UID")]
    pub impersonate_uid: Option<String>,
    /// Time limit for a single request other than a stream, such as 10s or 2m; 0: no limit
    #[arg(long, global = true, value_name = "TIME", default_value = "0", value_parser = time_limit)]
    pub request_timeout: Duration,
    /// Verbosity: commands that are run (3), output of these commands (4), requests (6)
    #[arg(long = "v", short = 'v', global = true, value_name = "LEVEL", default_value_t = 0)]
    pub verbosity: u8,
}

impl ClusterOptions {
    /// Returns the flags that give another run of this program the same cluster and user.
    pub(crate) fn arguments(&self) -> Result<Vec<String>, Error> {
        let mut words = Vec::new();
        let mut add = |flag: &str, value: Option<&str>| {
            if let Some(value) = value {
                words.extend([flag.to_owned(), value.to_owned()]);
            }
        };
        let text = |path: &Option<PathBuf>| match path {
            None => Ok(None),
            Some(path) => match path.to_str() {
                Some(path) => Ok(Some(path.to_owned())),
                None => Err(Error::Usage(format!("path {} is not valid UTF-8", path.display()))),
            },
        };
        add("--kubeconfig", text(&self.kubeconfig)?.as_deref());
        add("--context", self.context.as_deref());
        add("--cluster", self.cluster.as_deref());
        add("--user", self.user.as_deref());
        add("--server", self.server.as_ref().map(Uri::to_string).as_deref());
        add("--certificate-authority", text(&self.certificate_authority)?.as_deref());
        add("--tls-server-name", self.tls_server_name.as_deref());
        add("--token", self.token.as_deref());
        add("--client-certificate", self.client_certificate.as_deref());
        add("--client-key", self.client_key.as_deref());
        add("--as", self.impersonate.as_deref());
        for group in &self.impersonate_groups {
            add("--as-group", Some(group));
        }
        add("--as-uid", self.impersonate_uid.as_deref());
        if self.insecure_skip_tls_verify {
            words.push("--insecure-skip-tls-verify".to_owned());
        }
        Ok(words)
    }

    /// Loads the kubeconfig. Without one, uses the flags alone or the service account of the pod.
    fn loaded(&self) -> Result<kube::Config, Error> {
        let given = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
        let chosen =
            KubeConfigOptions { context: given(&self.context), cluster: given(&self.cluster), user: given(&self.user) };
        let files = kubeconfig::read(self.kubeconfig.as_deref(), std::env::var_os("KUBECONFIG"), std::env::home_dir());
        let config = files.and_then(|files| kubeconfig::select(&files, &chosen, self.server.as_ref()));
        match config.map_err(Error::Kubeconfig)? {
            Some(config) => Ok(config),
            // Pods have a service account in place of a kubeconfig.
            None => kube::Config::incluster()
                .map_err(|_| Error::Kubeconfig("no context is set, and neither is --server".into())),
        }
    }

    /// Overrides values of the kubeconfig with the flags.
    fn adjust(&self, config: &mut kube::Config) -> Result<(), Error> {
        if let Some(server) = &self.server {
            config.cluster_url.clone_from(server);
        }
        if self.certificate_authority.is_some() {
            config.root_cert_file.clone_from(&self.certificate_authority);
        }
        if self.tls_server_name.is_some() {
            config.tls_server_name.clone_from(&self.tls_server_name);
        }
        config.accept_invalid_certs |= self.insecure_skip_tls_verify;
        let user = &mut config.auth_info;
        if self.token.is_some() || self.client_certificate.is_some() {
            // The exec plugin would take precedence over the flags.
            user.exec = None;
            user.auth_provider = None;
            user.username = None;
        }
        if let Some(token) = &self.token {
            user.token = Some(token.clone().into());
        }
        match (&self.client_certificate, &self.client_key) {
            (None, None) => {}
            (Some(certificate), Some(key)) => {
                (user.client_certificate_data, user.client_key_data) = (None, None);
                (user.client_certificate, user.client_key) = (Some(certificate.clone()), Some(key.clone()));
            }
            _ => return Err(Error::Usage("--client-certificate and --client-key must be set together".into())),
        }
        if self.impersonate.is_some() {
            user.impersonate.clone_from(&self.impersonate);
        }
        if !self.impersonate_groups.is_empty() {
            user.impersonate_groups = Some(self.impersonate_groups.clone());
        }
        if self.impersonate_uid.is_some() {
            user.impersonate_uid.clone_from(&self.impersonate_uid);
        }
        Ok(())
    }
}

/// A client and the namespace that commands use.
#[derive(Clone)]
pub(crate) struct Connection {
    pub client: kube::Client,
    pub namespace: String,
    /// Time limit of a request; zero means none.
    pub request_timeout: Duration,
    pub verbosity: u8,
}

impl Connection {
    /// Creates the client. Sends no request.
    pub(crate) async fn open(options: &ClusterOptions) -> Result<Self, Error> {
        let mut config = options.loaded()?;
        options.adjust(&mut config)?;
        if config.proxy_url.is_none() {
            let variable = |name: &str| std::env::var(name).ok();
            config.proxy_url = proxy::from_environment(&config.cluster_url, variable).map_err(Error::Kubeconfig)?;
        }
        // Streams have no time limit.
        config.read_timeout = None;
        config.write_timeout = None;
        let namespace = options.namespace.clone().filter(|name| !name.is_empty());
        let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client = kube::Client::try_from(config).map_err(|error| Error::Kubeconfig(error.to_string()))?;
        Ok(Self { client, namespace, request_timeout: options.request_timeout, verbosity: options.verbosity })
    }

    /// Switches to another namespace, if one is set.
    pub(crate) fn within(self, namespace: Option<&str>) -> Self {
        match namespace {
            Some(namespace) => Self { namespace: namespace.to_owned(), ..self },
            None => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::parse;

    fn options(words: &[&str]) -> ClusterOptions {
        parse([&["kubectl-virt", "version"], words].concat()).unwrap().cluster
    }

    #[test]
    fn requests_have_no_time_limit_by_default() {
        assert_eq!(options(&["--request-timeout=2m"]).request_timeout, Duration::from_secs(120));
        assert_eq!(options(&[]).request_timeout, Duration::ZERO);
    }

    #[test]
    fn flags_override_the_kubeconfig() {
        let mut config = kube::Config::new(Uri::from_static("https://old.example.com"));
        config.auth_info.username = Some("joe".into());
        options(&["-s", "new.example.com", "--token=t", "--as-uid=7", "--insecure-skip-tls-verify=true"])
            .adjust(&mut config)
            .unwrap();
        assert_eq!(config.cluster_url.host(), Some("new.example.com"));
        assert!(config.accept_invalid_certs && config.auth_info.token.is_some() && config.auth_info.username.is_none());
        assert_eq!(config.auth_info.impersonate_uid.as_deref(), Some("7"));
        assert!(options(&["--client-key=k"]).adjust(&mut config).is_err());
    }

    #[test]
    fn flags_are_passed_to_another_run() {
        let words =
            ["--server", "https://192.0.2.1:6443/", "--token", "t", "--as", "joe", "--insecure-skip-tls-verify"];
        assert_eq!(options(&words).arguments().unwrap(), words);
    }

    #[tokio::test]
    async fn requests_go_through_the_proxy() {
        use tokio::io::AsyncReadExt;

        for (scheme, greeting) in [("http", &b"CONNECT api.example.com:6443 "[..]), ("socks5", &[5, 1, 0])] {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = format!("{scheme}://{}", listener.local_addr().unwrap());
            let mut config = kube::Config::new(Uri::from_static("https://api.example.com:6443"));
            config.accept_invalid_certs = true;
            config.proxy_url = Some(proxy::address(&address).unwrap());
            let client = kube::Client::try_from(config).unwrap();
            let received = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut bytes = vec![0; greeting.len()];
                stream.read_exact(&mut bytes).await.unwrap();
                bytes
            };
            tokio::select! {
                _ = client.apiserver_version() => panic!("{scheme}: no connection to the proxy"),
                bytes = received => assert_eq!(bytes, greeting, "{scheme}"),
            }
        }
    }
}
