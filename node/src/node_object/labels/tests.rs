use super::*;

const HOST: &str = "<capabilities>
  <host><cpu><arch>x86_64</arch><counter name='tsc' frequency='2592000000' scaling='no'/><counter name='other' frequency='1'/></cpu></host>
  <guest><os_type>hvm</os_type><arch name='x86_64'>
    <machine maxCpus='288'>pc-q35-10.0</machine>
    <machine canonical='pc-q35-10.0' maxCpus='288'>q35</machine>
    <machine maxCpus='288' deprecated='yes'>pc-q35-4.0</machine><machine deprecated='no'>pc-q35-9.0</machine>
    <domain type='qemu'><machine>not beneath arch</machine></domain>
  </arch></guest>
  <guest><arch name='i686'><machine>isapc</machine></arch></guest>
</capabilities>";

const DOMAIN: &str = "<domainCapabilities>
  <cpu>
    <mode name='host-passthrough' supported='yes'/>
    <mode name='host-model' supported='yes'>
      <model fallback='allow'>Skylake-Client-IBRS</model><vendor>Intel</vendor>
      <feature policy='require' name='ss'/><feature policy='disable' name='monitor'/>
    </mode>
    <mode name='custom' supported='yes'>
      <model usable='no'>EPYC-IBPB</model><model>unclear</model><model usable='no'>486</model>
      <model usable='yes'>Penryn</model><model usable='yes'>kvm64-v1</model><model usable='yes'>Opteron_G2</model>
      <model usable='no'>Twice</model><model usable='yes'>Twice</model>
    </mode>
  </cpu>
  <features>
    <sev supported='yes'><maxESGuests>15</maxESGuests></sev>
    <hyperv supported='yes'><enum name='features'><value>relaxed</value><value>vpindex</value><value>stimer</value></enum></hyperv>
    <launchSecurity supported='yes'><enum name='sectype'><value>sev</value><value>sev-snp</value></enum></launchSecurity>
    <tdx supported='no'/>
  </features>
</domainCapabilities>";

const FEATURES: &str = "<cpu><feature policy='require' name='apic'/><feature policy='force' name='x'/></cpu>";

fn amd64() -> NodeFacts {
    NodeFacts { architecture: "amd64".into(), ..NodeFacts::default() }
}

fn keys(capabilities: &Capabilities, facts: &NodeFacts) -> Vec<String> {
    labels(capabilities, facts)
        .into_iter()
        .map(|(key, value)| if value == TRUE { key } else { format!("{key}={value}") })
        .collect()
}

#[test]
fn labels_follow_libvirt() {
    let capabilities = Capabilities::parse(HOST, DOMAIN, Some(FEATURES)).unwrap();
    assert_eq!(capabilities.deprecated_machine_types(), &BTreeSet::from(["pc-q35-4.0".to_owned()]));
    assert_eq!(
        keys(&capabilities, &amd64()),
        [
            "cpu-feature.node.kubevirt.io/apic",
            "cpu-model-migration.node.kubevirt.io/EPYC-IBPB",
            "cpu-model-migration.node.kubevirt.io/Penryn",
            "cpu-model-migration.node.kubevirt.io/Twice",
            "cpu-model-migration.node.kubevirt.io/unclear",
            "cpu-model.node.kubevirt.io/Penryn",
            "cpu-model.node.kubevirt.io/Twice",
            "cpu-model.node.kubevirt.io/unclear",
            "cpu-timer.node.kubevirt.io/tsc-frequency=2592000000",
            "cpu-timer.node.kubevirt.io/tsc-scalable=false",
            "cpu-vendor.node.kubevirt.io/Intel",
            "host-model-cpu.node.kubevirt.io/Skylake-Client-IBRS",
            "host-model-required-features.node.kubevirt.io/ss",
            "hyperv.node.kubevirt.io/base",
            "hyperv.node.kubevirt.io/synictimer",
            "hyperv.node.kubevirt.io/time",
            "hyperv.node.kubevirt.io/vpindex",
            "kubevirt.io/sev",
            "kubevirt.io/sev-es",
            "kubevirt.io/sev-snp",
            "machine-type.node.kubevirt.io/isapc",
            "machine-type.node.kubevirt.io/pc-q35-10.0",
            "machine-type.node.kubevirt.io/pc-q35-4.0",
            "machine-type.node.kubevirt.io/pc-q35-9.0",
            "machine-type.node.kubevirt.io/q35",
        ]
    );
}

#[test]
fn an_arm_node_has_no_models_and_features() {
    let capabilities = Capabilities::parse(HOST, DOMAIN, None).unwrap();
    let arm = NodeFacts { architecture: "arm64".into(), cross_architecture: true, ..NodeFacts::default() };
    let keys = keys(&capabilities, &arm);
    assert!(keys.contains(&"kubevirt.io/vm-arch-arm64".to_owned()));
    assert!(
        !keys
            .iter()
            .any(|key| key.starts_with("cpu-model") || key.starts_with("cpu-feature") || key.starts_with("hyperv"))
    );
    assert!(keys.contains(&"machine-type.node.kubevirt.io/q35".to_owned()));
}

#[test]
fn a_node_emulates_guests_of_arm64_with_the_gate() {
    let facts = NodeFacts { cross_architecture: true, ..amd64() };
    let named = ["kubevirt.io/vm-arch-amd64", "kubevirt.io/vm-arch-arm64"];
    assert_eq!(keys(&Capabilities::default(), &facts), named);
    assert!(keys(&Capabilities::default(), &amd64()).is_empty());
}

#[test]
fn without_the_expanded_list_the_features_beyond_the_model_are_known() {
    let capabilities = Capabilities::parse(HOST, DOMAIN, None).unwrap();
    assert!(keys(&capabilities, &amd64()).contains(&"cpu-feature.node.kubevirt.io/ss".to_owned()));
}

#[test]
fn obsolete_models_follow_the_configuration() {
    let capabilities = Capabilities::parse(HOST, DOMAIN, None).unwrap();
    let obsolete = [("Skylake-Client-IBRS".to_owned(), true), ("Penryn".to_owned(), true), ("486".to_owned(), false)];
    let keys = keys(&capabilities, &NodeFacts { obsolete_models: obsolete.into(), ..amd64() });
    assert!(keys.contains(&label::OBSOLETE_HOST_MODEL.to_owned()));
    assert!(!keys.contains(&"cpu-model.node.kubevirt.io/Penryn".to_owned()));
    // An explicit list replaces the default list.
    assert!(keys.contains(&"cpu-model.node.kubevirt.io/Opteron_G2".to_owned()));
    assert!(keys.contains(&"cpu-model-migration.node.kubevirt.io/486".to_owned()));
}

#[test]
fn cve_2025_48514_sev_snp_is_offered_only_if_the_host_has_proven_it() {
    let (sev, es, snp) = ("kubevirt.io/sev", "kubevirt.io/sev-es", "kubevirt.io/sev-snp");
    let guests = |count: &str| format!("<sev supported='yes'><maxESGuests>{count}</maxESGuests></sev>");
    let kinds = |supported: &str, kind: &str| {
        format!(
            "<launchSecurity supported='{supported}'><enum name='sectype'><value>{kind}</value></enum></launchSecurity>"
        )
    };
    let all = kinds("yes", "sev-snp");
    for (features, expected) in [
        // The launch security types are those of the QEMU build, not of the host.
        (all.clone(), vec![]),
        (format!("<sev supported='no'><maxESGuests>9</maxESGuests></sev>{all}"), vec![]),
        (format!("<sev supported='yes'/>{all}"), vec![sev]),
        (guests("0") + &all, vec![sev]),
        (guests("-1") + &all, vec![sev]),
        (guests("many") + &all, vec![sev]),
        (guests("9"), vec![sev, es]),
        (guests("9") + &kinds("yes", "sev"), vec![sev, es]),
        (guests("9") + &kinds("no", "sev-snp"), vec![sev, es]),
        (guests("9") + &all, vec![sev, es, snp]),
    ] {
        let domain = format!("<domainCapabilities><features>{features}</features></domainCapabilities>");
        let mut found = keys(&Capabilities::parse(HOST, &domain, None).unwrap(), &amd64());
        found.retain(|key| key.starts_with("kubevirt.io/sev"));
        assert_eq!(found, expected, "{features}");
    }
}

#[test]
fn surroundings_become_labels() {
    let facts = NodeFacts { realtime: true, cpu_manager: true, ..amd64() };
    assert_eq!(keys(&Capabilities::default(), &facts), ["kubevirt.io/realtime"]);
    assert_eq!(switches(&facts)["kubevirt.io/cpumanager"], "true");
    assert_eq!(switches(&amd64())["cpumanager"], "false");
}

#[test]
fn changes_ignore_labels_of_other_owners() {
    let map = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<BTreeMap<_, _>>()
    };
    let current = map(&[
        ("kubernetes.io/arch", "amd64"),
        ("cpu-vendor.node.kubevirt.io/AMD", "true"),
        ("kubevirt.io/s390-pv", "true"),
        ("scheduling.node.kubevirt.io/tsc-frequency-1", "true"),
        ("machine-type.node.kubevirt.io/q35", "true"),
        ("kubevirt.io/schedulable", "false"),
    ]);
    let desired = map(&[("machine-type.node.kubevirt.io/q35", "true"), ("kubevirt.io/schedulable", "true")]);
    let changes_now = changes(&current, &desired);
    assert_eq!(
        changes_now,
        BTreeMap::from([
            ("cpu-vendor.node.kubevirt.io/AMD".to_owned(), None),
            ("kubevirt.io/s390-pv".to_owned(), None),
            ("kubevirt.io/schedulable".to_owned(), Some("true".to_owned())),
        ])
    );
    let mut after = current;
    for (key, value) in changes_now {
        match value {
            Some(value) => after.insert(key, value),
            None => after.remove(&key),
        };
    }
    assert_eq!(changes(&after, &desired), BTreeMap::new());
}

#[test]
fn invalid_labels_are_left_out() {
    let domain = format!(
        "<domainCapabilities><cpu><mode name='custom'><model>{}</model><model>a b</model><model>-x</model><model>ok</model><model> </model><model>../x</model></mode></cpu></domainCapabilities>",
        "x".repeat(64)
    );
    let keys = keys(&Capabilities::parse("<capabilities/>", &domain, None).unwrap(), &amd64());
    assert_eq!(keys, ["cpu-model-migration.node.kubevirt.io/ok", "cpu-model.node.kubevirt.io/ok"]);
}

#[test]
fn any_text_is_parsed_or_rejected() {
    let entities = "<!DOCTYPE x [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;'>]><x>&b;</x>";
    let deep = format!("{}{}", "<a>".repeat(2000), "</a>".repeat(2000));
    let many = format!("<a>{}</a>", "<b/>".repeat(150_000));
    for text in ["", "<", "<a", "<a></b>", "\u{0}", "plain", entities, &many, "<a/><b/>"] {
        assert!(Capabilities::parse(text, DOMAIN, None).is_err(), "{:.40}", text);
        assert!(Capabilities::parse(HOST, text, None).is_err(), "{:.40}", text);
        assert!(Capabilities::parse(HOST, DOMAIN, Some(text)).is_err(), "{:.40}", text);
    }
    let _ = Capabilities::parse(&deep, DOMAIN, None);
    for cut in (0..DOMAIN.len()).filter(|cut| DOMAIN.is_char_boundary(*cut)) {
        let _ = Capabilities::parse(HOST, &DOMAIN[..cut], None);
    }
    // Elements at unexpected positions.
    let odd = "<x><model>a</model><mode name='custom'><model>b</model></mode><machine>m</machine><counter name='tsc' frequency='-1'/></x>";
    assert_eq!(Capabilities::parse(odd, odd, None).unwrap(), Capabilities::default());
}
