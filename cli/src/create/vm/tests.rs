//! Manifests that virtctl of KubeVirt 1.10 prints for the same arguments.

use serde_json::Value;

use super::super::tests::{check, check_errors, made};

/// Wraps the fields of a VM's spec and of its template's spec.
fn vm(spec: &str, template: &str) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: m}}
spec:
  runStrategy: Always
  {spec}
  template:
    metadata: {{}}
    spec:
      terminationGracePeriodSeconds: 180
      {template}
status: {{}}
"
    )
}

const DOMAIN: &str = "domain: {devices: {}, memory: {guest: 512Mi}, resources: {}}";
const SIZED: &str = "domain: {devices: {}, resources: {}}";

/// Compares VMs with name `m`: arguments, fields of the spec, fields of the template's spec.
fn check_vms(cases: &[(&[&str], &str, String)]) {
    for (words, spec, template) in cases {
        let words = [&["vm", "--name=m"], *words].concat();
        check(&[(&words, &vm(spec, template))]);
    }
}

#[test]
fn vms_equal_those_of_virtctl() {
    check_vms(&[
        (&[], "", DOMAIN.into()),
        (&["--memory=1024Mi"], "", DOMAIN.replace("512Mi", "1Gi")),
        (
            &["--instancetype=u1.nano", "--preference=alpine"],
            "instancetype: {name: u1.nano}\n  preference: {name: alpine}",
            SIZED.into(),
        ),
        (
            &["--instancetype=VirtualMachineInstancetype/i", "--preference=virtualmachineclusterpreference/p"],
            "instancetype: {name: i, kind: virtualmachineinstancetype}\n  preference: {name: p, kind: \
             virtualmachineclusterpreference}",
            SIZED.into(),
        ),
        (
            &["--volume-containerdisk=src:reg:5000/a:b", "--volume-containerdisk=src:c,name:second,bootorder:1"],
            "",
            "domain: {devices: {disks: [{name: second, bootOrder: 1}]}, memory: {guest: 512Mi}, resources: {}}
      volumes:
      - {name: m-containerdisk-0, containerDisk: {image: 'reg:5000/a:b'}}
      - {name: second, containerDisk: {image: c}}"
                .into(),
        ),
        (
            &["--volume-sysprep=src:answers", "--infer-preference=false"],
            "",
            format!("{DOMAIN}\n      volumes: [{{name: sysprepdisk, sysprep: {{configMap: {{name: answers}}}}}}]"),
        ),
        (
            &["--volume-sysprep=src:answers,type:Secret"],
            "",
            format!("{DOMAIN}\n      volumes: [{{name: sysprepdisk, sysprep: {{secret: {{name: answers}}}}}}]"),
        ),
    ]);
    check(&[(
        &["vm", "--name=m", "-n=ns", "--run-strategy=rerunonfailure", "--termination-grace-period=5"],
        &vm("", DOMAIN)
            .replace("{name: m}", "{name: m, namespace: ns}")
            .replace("runStrategy: Always", "runStrategy: RerunOnFailure")
            .replace("180", "5"),
    )]);
}

#[test]
fn instance_type_and_preference_are_inferred_from_the_boot_volume() {
    let claim = "volumes: [{name: c, persistentVolumeClaim: {claimName: c}}]";
    let ignored = |volume: &str| format!("{{inferFromVolume: {volume}, inferFromVolumeFailurePolicy: Ignore}}");
    let both = format!("instancetype: {}\n  preference: {}", ignored("c"), ignored("c"));
    check_vms(&[
        (&["--volume-pvc=src:c"], &both, format!("{DOMAIN}\n      {claim}")),
        (
            &["--volume-pvc=src:c", "--memory=512Mi"],
            &format!("preference: {}", ignored("c")),
            format!("{DOMAIN}\n      {claim}"),
        ),
        (
            &["--volume-pvc=src:c", "--infer-instancetype", "--infer-preference=false"],
            "instancetype: {inferFromVolume: c}",
            format!("{SIZED}\n      {claim}"),
        ),
        (
            &["--volume-pvc=src:c", "--instancetype=i", "--infer-preference-from=c"],
            "instancetype: {name: i}\n  preference: {inferFromVolume: c}",
            format!("{SIZED}\n      {claim}"),
        ),
        (
            &["--volume-pvc=src:c,bootorder:2", "--volume-pvc=src:d,bootorder:1", "--infer-instancetype=false"],
            &format!("preference: {}", ignored("d")),
            "domain:
        devices: {disks: [{name: c, bootOrder: 2}, {name: d, bootOrder: 1}]}
        memory: {guest: 512Mi}
        resources: {}
      volumes:
      - {name: c, persistentVolumeClaim: {claimName: c}}
      - {name: d, persistentVolumeClaim: {claimName: d}}"
                .into(),
        ),
    ]);
}

#[test]
fn imports_become_data_volumes() {
    let storage = "storage: {resources: {requests: {storage: 1Gi}}}";
    for (import, spec) in [
        ("type:blank,size:1Gi", "source: {blank: {}}"),
        ("type:gcs,size:1Gi,url:gs://a,secretref:s", "source: {gcs: {url: 'gs://a', secretRef: s}}"),
        (
            "type:http,size:1Gi,url:http://a/b,extraheaders:x:1;y:2,secretextraheaders:s,certconfigmap:c",
            "source: {http: {url: 'http://a/b', extraHeaders: ['x:1', 'y:2'], secretExtraHeaders: [s], certConfigMap: c}}",
        ),
        ("type:imageio,size:1Gi,url:http://a,diskid:1", "source: {imageio: {url: 'http://a', diskId: '1'}}"),
        (
            "type:registry,size:1Gi,url:docker://a,pullmethod:node",
            "source: {registry: {url: 'docker://a', pullMethod: node}}",
        ),
        ("type:registry,size:1Gi,imagestream:i", "source: {registry: {imageStream: i}}"),
        ("type:s3,size:1Gi,url:http://a,secretref:s", "source: {s3: {url: 'http://a', secretRef: s}}"),
        (
            "type:vddk,size:1Gi,url:http://a,uuid:u,thumbprint:t,secretref:s,backingfile:b,initimageurl:i",
            "source: {vddk: {url: 'http://a', uuid: u, thumbprint: t, secretRef: s, backingFile: b, initImageURL: i}}",
        ),
        ("type:pvc,size:1Gi,src:ns/a", "source: {pvc: {namespace: ns, name: a}}"),
        ("type:snapshot,size:1Gi,src:ns/a", "source: {snapshot: {namespace: ns, name: a}}"),
        ("type:ds,size:1Gi,src:a", "sourceRef: {kind: DataSource, name: a}"),
        ("type:ds,size:1Gi,src:ns/a", "sourceRef: {kind: DataSource, name: a, namespace: ns}"),
    ] {
        let import = format!("--volume-import={import},name:v");
        let template = format!("dataVolumeTemplates: [{{metadata: {{name: v}}, spec: {{{spec}, {storage}}}}}]");
        let volumes = format!("{DOMAIN}\n      volumes: [{{name: v, dataVolume: {{name: v}}}}]");
        let words = [&import, "--infer-instancetype=false", "--infer-preference=false"];
        check_vms(&[(&words, &template, volumes)]);
    }
    let made =
        made(&["vm", "--volume-import=type:ds,src:a", "--volume-datasource=src:b", "--volume-blank=size:1Gi"]).unwrap();
    let templates = made["spec"]["dataVolumeTemplates"].as_array().unwrap();
    let sources = templates.iter().map(|one| one["spec"]["sourceRef"]["name"].as_str().unwrap_or("blank"));
    assert_eq!(sources.collect::<Vec<_>>(), ["blank", "b", "a"], "the deprecated flags come first, as in virtctl");
    assert_eq!(templates[1]["spec"]["storage"]["resources"], serde_json::json!({}));
    let name = templates[1]["metadata"]["name"].as_str().unwrap();
    assert!(name.starts_with("imported-volume-") && name.len() == 21, "{name}");
    assert_eq!(made["spec"]["instancetype"], Value::Null, "nothing is inferred from a blank volume");
}

#[test]
fn cloud_init_and_credentials_equal_those_of_virtctl() {
    let volume = |source: &str| format!("{DOMAIN}\n      volumes: [{{name: cloudinitdisk, {source}}}]");
    let password = std::env::temp_dir().join(format!("create-vm-{}", std::process::id()));
    std::fs::write(&password, "secret\n").unwrap();
    let from_file = format!("--password-file={}", password.display());
    let agent = "runcmd:\\n  - [ setsebool, -P, 'virt_qemu_ga_manage_ssh', 'on' ]";
    let key = "accessCredentials: [{sshPublicKey: {source: {secret: {secretName: s}}, propagationMethod: ";
    check_vms(&[
        (&["--cloud-init=none", "--user=u"], "", DOMAIN.into()),
        (&["--cloud-init=ConfigDrive"], "", volume("cloudInitConfigDrive: {userData: '#cloud-config'}")),
        (
            &["--user=u", "--ssh-key=a,b"],
            "",
            volume("cloudInitNoCloud: {userData: \"#cloud-config\\nuser: u\\nssh_authorized_keys:\\n  - a\\n  - b\"}"),
        ),
        (
            &[&from_file],
            "",
            volume("cloudInitNoCloud: {userData: \"#cloud-config\\npassword: secret\\nchpasswd: { expire: False }\"}"),
        ),
        (
            &["--cloud-init-user-data=YQ==", "--cloud-init-network-data=Yg=="],
            "",
            volume("cloudInitNoCloud: {userDataBase64: YQ==, networkDataBase64: Yg==}"),
        ),
        (
            &["--access-cred=src:s,user:u"],
            "",
            volume(&format!("cloudInitNoCloud: {{userData: \"#cloud-config\\n{agent}\"}}"))
                + &format!("\n      {key}{{qemuGuestAgent: {{users: [u]}}}}}}}}]"),
        ),
        (
            &["--access-cred=src:s,method:nocloud"],
            "",
            volume("cloudInitNoCloud: {userData: '#cloud-config'}") + &format!("\n      {key}{{noCloud: {{}}}}}}}}]"),
        ),
        (
            &["--access-cred=type:password,src:s"],
            "",
            format!(
                "{DOMAIN}\n      accessCredentials: [{{userPassword: {{source: {{secret: {{secretName: s}}}}, \
                 propagationMethod: {{qemuGuestAgent: {{}}}}}}}}]"
            ),
        ),
    ]);
    std::fs::remove_file(password).unwrap();
}

#[test]
fn wrong_flags_are_refused_with_the_messages_of_virtctl() {
    check_errors(&[
        (&["vm", "--memory=big"], "failed to parse \"--memory\" flag: quantities must match"),
        (&["vm", "--memory=1Gi", "--instancetype=i"], "cannot be used with"),
        (&["vm", "--run-strategy=Sometimes"], "Always"),
        (&["vm", "--instancetype=pod/i"], "invalid instancetype kind \"pod\", supported values are: "),
        (&["vm", "--preference=a/b/c"], "invalid count 2 of slashes in prefix/name"),
        (&["vm", "--infer-instancetype"], "at least one volume is needed to infer"),
        (&["vm", "--infer-preference-from=x", "--volume-pvc=src:c"], "there is no volume with name \"x\""),
        (&["vm", "--infer-preference", "--volume-containerdisk=src:c"], "works only with datasources"),
        (&["vm", "--infer-preference", "--volume-import=type:blank,size:1Gi"], "this datavolume is not valid to infer"),
        (&["vm", "--volume-pvc=src:ns/c"], "not allowed to specify namespace of pvc \"c\""),
        (&["vm", "--volume-pvc=src:c", "--volume-pvc=src:c"], "there is already a volume with name \"c\""),
        (&["vm", "--volume-pvc=src:c,bootorder:0"], "bootorder must be greater than 0"),
        (&["vm", "--volume-pvc=src:c,bootorder:1", "--volume-pvc=src:d,bootorder:1"], "was specified multiple times"),
        (
            &["vm", "--volume-containerdisk=name:a"],
            "failed to parse \"--volume-containerdisk\" flag: src must be specified",
        ),
        (&["vm", "--volume-containerdisk=src:a,name:A"], "invalid name \"A\": a lowercase RFC 1123 label"),
        (&["vm", "--volume-sysprep=src:a,type:pod"], "invalid sysprep source type \"pod\""),
        (&["vm", "--volume-import=size:1Gi"], "type must be specified"),
        (&["vm", "--volume-import=type:tape"], "invalid volume import type \"tape\", see help for supported values"),
        (&["vm", "--volume-import=type:blank"], "size must be specified"),
        (&["vm", "--volume-import=type:pvc,src:a"], "namespace of pvc \"a\" must be specified"),
        (&["vm", "--volume-import=type:http,size:1Gi"], "url is required with http volume source"),
        (&["vm", "--volume-import=type:imageio,size:1Gi,url:a"], "url and diskid are both required with imageio"),
        (&["vm", "--volume-import=type:registry,size:1Gi"], "exactly one of url or imagestream must be defined"),
        (&["vm", "--volume-import=type:registry,url:a,pullmethod:x,size:1Gi"], "pullmethod must be set to pod or node"),
        (&["vm", "--volume-import=type:vddk,url:a,size:1Gi"], "uuid is required with vddk volume source"),
        (&["vm", "--access-cred=src:s"], "user must be specified with access credential ssh method ga"),
        (&["vm", "--access-cred=src:s,method:x"], "invalid access credentials ssh method \"x\""),
        (&["vm", "--access-cred=src:s,method:nocloud,user:u"], "user cannot be specified"),
        (&["vm", "--access-cred=src:s,method:nocloud", "--cloud-init=none"], "have to match: nocloud vs none"),
        (&["vm", "--access-cred=src:s,type:password,method:nocloud"], "password method \"nocloud\""),
        (&["vm", "--access-cred=src:s,type:x"], "invalid access credential type \"x\""),
        (&["vm", "--cloud-init-user-data=a", "--user=b"], "cannot be used with"),
        (&["vm", "--cloud-init=floppy"], "nocloud"),
    ]);
}
