//! The kubeconfig by the rules of client-go, which kubectl follows. The loader of the kube crate is stricter: it rejects
//! missing files and lines in data, takes empty values for set ones, and compares `NO_PROXY` with the address of the proxy.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use http::Uri;
use kube::config::{Cluster, Context, ExecAuthCluster, KubeConfigOptions, Kubeconfig};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use serde_json::Value;

use crate::{option_value, proxy};

/// Fields with data in Base64.
const DATA: [&str; 3] = ["certificate-authority-data", "client-certificate-data", "client-key-data"];
/// Fields with paths, relative to the folder of the file that contains them.
const PATHS: [&str; 4] = ["certificate-authority", "client-certificate", "client-key", "tokenFile"];

/// Reads the file of the flag, or those of the variable `KUBECONFIG` that exist, or that of the home directory.
pub(crate) fn read(
    flag: Option<&Path>,
    variable: Option<OsString>,
    home: Option<PathBuf>,
) -> Result<Kubeconfig, String> {
    let paths = match (flag, variable.filter(|list| !list.is_empty())) {
        (Some(path), _) => vec![path.to_owned()],
        (None, Some(list)) => std::env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()).collect(),
        (None, None) => home.map(|home| home.join(".kube/config")).into_iter().collect(),
    };
    let mut files = Vec::new();
    for path in paths {
        match fs::read_to_string(&path).and_then(|text| Ok((std::path::absolute(&path)?, text))) {
            Ok(file) => files.push(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound && flag.is_none() => {}
            Err(error) => return Err(format!("{}: {error}", path.display())),
        }
    }
    merge(&files)
}

/// Merges the texts of files. The first value of a setting and the first definition of a name are in effect.
fn merge(files: &[(PathBuf, String)]) -> Result<Kubeconfig, String> {
    let mut merged = Kubeconfig::default();
    for (path, text) in files {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        // kubectl, too, reads names such as n and y as text.
        let options = serde_saphyr::options! { strict_booleans: true };
        let documents = serde_saphyr::from_multiple_with_options::<Value>(text, options);
        for mut document in documents.map_err(|error| failed(&error))? {
            normalize(&mut document, path.parent().unwrap_or(Path::new("/")));
            let file = serde_json::from_value(document).map_err(|error| failed(&error))?;
            merged = merged.merge(file).map_err(|error| failed(&error))?;
        }
    }
    Ok(merged)
}

/// Removes empty values and the white space in data, and makes paths absolute.
fn normalize(document: &mut Value, folder: &Path) {
    let is_set = |value: &Value| !value.is_null() && value != "";
    let absolute = |path: &mut String| *path = folder.join(&*path).display().to_string();
    let Some(document) = document.as_object_mut() else { return };
    document.retain(|name, value| name != "kind" && name != "apiVersion" && is_set(value));
    for (list, field) in [("clusters", "cluster"), ("users", "user"), ("contexts", "context")] {
        for named in document.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(fields) = named.get_mut(field).and_then(Value::as_object_mut) else { continue };
            fields.retain(|_, value| is_set(value));
            for (name, value) in fields.iter_mut() {
                match value {
                    Value::String(data) if DATA.contains(&name.as_str()) => data.retain(|c| !c.is_ascii_whitespace()),
                    Value::String(path) if PATHS.contains(&name.as_str()) => absolute(path),
                    _ => {}
                }
            }
            // Commands without a slash are looked up in PATH.
            if let Some(Value::String(command)) = fields.get_mut("exec").and_then(|exec| exec.get_mut("command"))
                && command.contains('/')
            {
                absolute(command);
            }
            if field == "context" {
                // The kube crate requires this field.
                fields.entry("cluster").or_insert_with(|| "".into());
            }
        }
    }
}

/// Returns the configuration of the chosen context, cluster and user; none without a server.
pub(crate) fn select(
    files: &Kubeconfig,
    chosen: &KubeConfigOptions,
    server: Option<&Uri>,
) -> Result<Option<kube::Config>, String> {
    let missing = |kind: &str, name: &str| format!("{kind} {name:?} does not exist");
    let context = match chosen.context.as_ref().or(files.current_context.as_ref()) {
        None => Context::default(),
        Some(name) => {
            let named = files.contexts.iter().find(|context| context.name == *name);
            named.and_then(|named| named.context.clone()).ok_or_else(|| missing("context", name))?
        }
    };
    let name = chosen.cluster.as_ref().unwrap_or(&context.cluster);
    let named = files.clusters.iter().find(|cluster| cluster.name == *name);
    if named.is_none() && chosen.cluster.is_some() {
        return Err(missing("cluster", name));
    }
    let cluster: Cluster = named.and_then(|named| named.cluster.clone()).unwrap_or_default();
    let url = match (server, &cluster.server) {
        (Some(server), _) => server.clone(),
        (None, Some(server)) => {
            option_value::server(server).map_err(|error| format!("server of cluster {name:?}: {error}"))?
        }
        (None, None) if name.is_empty() => return Ok(None),
        (None, None) => return Err(format!("cluster {name:?} has no server")),
    };

    let name = chosen.user.as_ref().or(context.user.as_ref());
    let named = files.auth_infos.iter().find(|user| Some(&user.name) == name);
    if let (None, Some(name)) = (named, &chosen.user) {
        return Err(missing("user", name));
    }
    let mut user = named.and_then(|named| named.auth_info.clone()).unwrap_or_default();
    // The file wins over a token beside it. The kube crate would keep the newline at its end.
    if let Some(path) = &user.token_file {
        match fs::read_to_string(path) {
            Ok(token) => user.token = Some(token.trim().to_owned().into()),
            Err(_) if user.token.is_some() => {}
            Err(error) => return Err(format!("{path}: {error}")),
        }
    }
    let described = ExecAuthCluster::try_from(&cluster).map_err(|error| error.to_string())?;

    let mut config = kube::Config::new(url);
    if let Some(pem) = &described.certificate_authority_data {
        let certificates = CertificateDer::pem_slice_iter(pem).map(|read| read.map(|der| der.to_vec()));
        let certificates = certificates.collect::<Result<Vec<_>, _>>();
        let certificates = certificates.map_err(|error| format!("certificate authority: {error}"))?;
        if certificates.is_empty() {
            return Err("certificate authority: no certificate".into());
        }
        config.root_cert = Some(certificates);
    }
    if let Some(exec) = user.exec.as_mut().filter(|exec| exec.provide_cluster_info) {
        exec.cluster = Some(described);
    }
    if let Some(namespace) = context.namespace {
        config.default_namespace = namespace;
    }
    let proxy = cluster.proxy_url.as_deref().map(proxy::address).transpose();
    config.proxy_url = proxy.map_err(|error| format!("proxy-url: {error}"))?;
    config.accept_invalid_certs = cluster.insecure_skip_tls_verify.unwrap_or_default();
    config.disable_compression = cluster.disable_compression.unwrap_or_default();
    config.tls_server_name = cluster.tls_server_name;
    config.auth_info = user;
    Ok(Some(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate, with line breaks as Base64 tools make them. Nothing checks its content.
    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nAAEC\n-----END CERTIFICATE-----\n";
    const CERTIFICATE_DATA: &str =
        "\n      LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCkFBRUMK\n      LS0tLS1FTkQgQ0VSVElGSUNBVEUtLS0tLQo=\n";

    fn texts(files: &[&str]) -> Kubeconfig {
        let file = |(number, text): (usize, &&str)| (format!("/etc/{number}/config").into(), (*text).to_owned());
        merge(&files.iter().enumerate().map(file).collect::<Vec<_>>()).unwrap()
    }

    fn chosen(files: &[&str]) -> kube::Config {
        select(&texts(files), &KubeConfigOptions::default(), None).unwrap().unwrap()
    }

    /// A file with one context and these lines in its cluster, user and context.
    fn one(cluster: &str, user: &str, context: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: x\n\
             clusters:\n- name: c\n  cluster:\n    server: https://c:1\n    {cluster}\n\
             users:\n- name: u\n  user:\n    as: joe\n    {user}\n\
             contexts:\n- name: x\n  context:\n    cluster: c\n    user: u\n    {context}\n"
        )
    }

    fn directory(test: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("kubeconfig-{test}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        directory
    }

    #[test]
    fn files_that_are_read() {
        let home = directory("files");
        fs::create_dir_all(home.join(".kube")).unwrap();
        let path = |name: &str| home.join(name);
        for (name, context) in [(".kube/config", "home"), ("a", "a"), ("b", "b"), ("none", "''")] {
            fs::write(path(name), format!("current-context: {context}\n")).unwrap();
        }
        fs::write(path("broken"), "a: [").unwrap();
        fs::write(path("empty"), "").unwrap();
        let list = |names: &str| {
            let paths = names.split(':').map(|name| if name.is_empty() { PathBuf::new() } else { path(name) });
            std::env::join_paths(paths).unwrap()
        };
        for (flag, variable, expected) in [
            (None, None, Ok(Some("home"))),
            (None, Some(""), Ok(Some("home"))),
            (None, Some(":"), Ok(None)),
            (None, Some("missing:a:b"), Ok(Some("a"))),
            (None, Some("none:empty:b:a"), Ok(Some("b"))),
            (None, Some("missing"), Ok(None)),
            (None, Some("a:broken"), Err(())),
            (None, Some(".kube:a"), Err(())),
            (Some("b"), Some("a"), Ok(Some("b"))),
            (Some("missing"), Some("a"), Err(())),
        ] {
            let variable = variable.map(|names| if names.is_empty() { OsString::new() } else { list(names) });
            let files = read(flag.map(path).as_deref(), variable.clone(), Some(home.clone()));
            let context = files.map(|files| files.current_context).map_err(|_| ());
            assert_eq!(context, expected.map(|name| name.map(str::to_owned)), "{flag:?} {variable:?}");
        }
        fs::remove_dir_all(home).unwrap();
    }

    #[test]
    fn the_first_definition_wins() {
        let first = "current-context: ''\nclusters:\n- name: d\n  cluster: {server: 'https://d:1'}\nusers:\n";
        let second = one("proxy-url: ''", "token: ''", "namespace: n");
        let third = "kind: Other\ncurrent-context: y\nclusters:\n- name: c\n  cluster: {server: 'https://e:1', tls-server-name: e}\n";
        let config = chosen(&[first, &second, third]);
        assert_eq!(config.cluster_url, "https://c:1");
        assert_eq!((config.tls_server_name, config.proxy_url), (None, None));
        assert_eq!(config.default_namespace, "n");
        assert!(config.auth_info.token.is_none());
        assert_eq!(config.auth_info.impersonate.as_deref(), Some("joe"));
        assert_eq!(chosen(&[&one("", "", "namespace: ''")]).default_namespace, "default");
    }

    #[test]
    fn paths_are_relative_to_their_file() {
        let users = "users:\n- name: u\n  user:\n    client-certificate: a.crt\n    client-key: /k\n    tokenFile: ../t\n    \
                     exec: {command: ./login, env: [{name: EMPTY, value: ''}]}\n\
                     - name: v\n  user: {exec: {command: login}}\n";
        let files = texts(&["clusters:\n- name: c\n  cluster: {certificate-authority: ca}\n", users]);
        let user = files.auth_infos[0].auth_info.clone().unwrap();
        assert_eq!(files.clusters[0].cluster.as_ref().unwrap().certificate_authority.as_deref(), Some("/etc/0/ca"));
        assert_eq!(user.client_certificate.as_deref(), Some("/etc/1/a.crt"));
        assert_eq!((user.client_key.as_deref(), user.token_file.as_deref()), (Some("/k"), Some("/etc/1/../t")));
        let exec = user.exec.unwrap();
        assert_eq!(exec.command.as_deref(), Some("/etc/1/./login"));
        assert_eq!(exec.env.unwrap()[0]["value"], "");
        let other = files.auth_infos[1].auth_info.clone().unwrap();
        assert_eq!(other.exec.unwrap().command.as_deref(), Some("login"));
    }

    #[test]
    fn certificate_authorities_and_tokens() {
        let directory = directory("data");
        let path = |name: &str| directory.join(name).display().to_string();
        fs::write(path("ca"), CERTIFICATE).unwrap();
        fs::write(path("token"), "from-file\n").unwrap();
        fs::write(path("empty"), "").unwrap();
        let data = format!("certificate-authority-data: |{CERTIFICATE_DATA}");
        let file = format!("certificate-authority: {}\n    certificate-authority-data: ''", path("ca"));
        for text in [&data, &file] {
            assert_eq!(chosen(&[&one(text, "", "")]).root_cert, Some(vec![vec![0, 1, 2]]), "{text}");
        }
        assert_eq!(chosen(&[&one("", "", "")]).root_cert, None);
        for bad in ["missing", "empty"] {
            let files = texts(&[&one(&format!("certificate-authority: {}", path(bad)), "", "")]);
            assert!(select(&files, &KubeConfigOptions::default(), None).is_err(), "{bad}");
        }
        for (user, expected) in [
            (format!("tokenFile: {}", path("token")), "from-file"),
            (format!("tokenFile: {}\n    token: t", path("token")), "from-file"),
            (format!("tokenFile: {}\n    token: t", path("missing")), "t"),
        ] {
            let user = serde_json::to_value(chosen(&[&one("", &user, "")]).auth_info).unwrap();
            assert_eq!(user["token"], expected);
        }
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn plugins_get_the_cluster() {
        let exec = |info: bool| format!("exec: {{apiVersion: v1, command: login, provideClusterInfo: {info}}}");
        for info in [true, false] {
            let exec = chosen(&[&one("", &exec(info), "")]).auth_info.exec.unwrap();
            assert_eq!(exec.cluster.is_some(), info);
        }
    }

    #[test]
    fn proxies_of_clusters() {
        for (url, expected) in [
            ("http://p:1", Some("http://p:1/")),
            ("socks5://p:1", Some("socks5://p:1/")),
            ("p:1", None),
            ("ftp://p:1", None),
        ] {
            let files = texts(&[&one(&format!("proxy-url: {url}"), "", "")]);
            let config = select(&files, &KubeConfigOptions::default(), None).ok().flatten();
            let proxy = config.and_then(|config| config.proxy_url).map(|uri| uri.to_string());
            assert_eq!(proxy.as_deref(), expected, "{url}");
        }
    }

    #[test]
    fn chosen_names_must_exist() {
        let files = texts(&[&one("", "", ""), "contexts:\n- name: bare\n  context: {user: other}\n"]);
        let server = Uri::from_static("https://s:1");
        for (context, cluster, user, server, expected) in [
            (None, None, None, None, Ok(Some("https://c:1/"))),
            (Some("x"), Some("c"), Some("u"), None, Ok(Some("https://c:1/"))),
            (None, None, None, Some(&server), Ok(Some("https://s:1/"))),
            (Some("y"), None, None, None, Err(())),
            (None, Some("y"), None, None, Err(())),
            (None, None, Some("y"), None, Err(())),
            // A user of a context need not exist.
            (Some("bare"), Some("c"), None, None, Ok(Some("https://c:1/"))),
            (Some("bare"), None, None, None, Ok(None)),
        ] {
            let name = |name: Option<&str>| name.map(str::to_owned);
            let options = KubeConfigOptions { context: name(context), cluster: name(cluster), user: name(user) };
            let config = select(&files, &options, server).map_err(|_| ());
            let url = config.map(|config| config.map(|config| config.cluster_url.to_string()));
            assert_eq!(url, expected.map(name), "{context:?} {cluster:?} {user:?}");
        }
    }
}
