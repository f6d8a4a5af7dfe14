use super::*;

fn plan(instance: u8) -> Plan {
    Plan::new(PathBuf::from("/src"), instance).unwrap()
}

#[test]
fn networks_of_all_instances_are_disjoint() {
    let all: Vec<Network> = (0..=MAX_INSTANCE)
        .flat_map(|instance| {
            let plan = plan(instance);
            [plan.node_network(), plan.pods(), plan.services()]
        })
        .collect();
    for (index, one) in all.iter().enumerate() {
        for other in &all[index + 1..] {
            assert!(!one.overlaps(other), "{one} and {other}");
        }
    }
}

#[test]
fn nodes_have_addresses_apart_from_control_plane_and_host() {
    let plan = plan(0);
    let mut seen = vec![plan.control_address(), plan.host_address()];
    for node in plan.nodes(MAX_NODES).into_iter().chain([plan.vm_node()]) {
        assert!(!seen.contains(&node.address));
        assert!(plan.node_network().overlaps(&Network { base: node.address, prefix: 32 }));
        assert!(plan.pods().overlaps(&node.pods));
        seen.push(node.address);
    }
}

#[test]
fn second_family_has_networks_of_its_own() {
    let mut plan = plan(3);
    let (first, vm) = (plan.node(1), plan.vm_node());
    let shown = [plan.node_network6(), plan.pods6(), plan.services6(), first.pods6, vm.pods6];
    let shown: Vec<String> = shown.iter().map(ToString::to_string).collect();
    let expected = ["fd66:7600:3::/64", "fd66:7600:3:100::/56", "fd66:7600:3:200::/112", "fd66:7600:3:101::/64"];
    assert_eq!(shown[..4], expected);
    assert_eq!(shown[4], "fd66:7600:3:115::/64");
    assert_eq!(
        (first.address6.to_string(), vm.address6.to_string()),
        ("fd66:7600:3::11".into(), "fd66:7600:3::25".into())
    );
    assert_eq!(plan.families(1, 2), "1");
    plan.variant.dual_stack = true;
    assert_eq!(plan.families(plan.pods(), plan.pods6()), "10.220.0.0/16,fd66:7600:3:100::/56");
}

#[test]
fn interface_names_fit_the_kernels_limit() {
    for instance in 0..=MAX_INSTANCE {
        assert!(plan(instance).host_link().len() < 16);
        assert!(plan(instance).node(MAX_NODES).link.len() < 16);
        assert!(plan(instance).vm_node().lan_link.len() < 16);
    }
}

#[test]
fn first_instance_has_plain_paths_and_others_a_number() {
    assert_eq!(plan(0).kubeconfig(), Path::new("/src/build/kubeconfig"));
    assert_eq!(plan(0).state(), Path::new("/src/build/cluster"));
    assert_eq!(plan(3).kubeconfig(), Path::new("/src/build/kubeconfig-3"));
    assert_eq!(plan(3).state(), Path::new("/src/build/cluster-3"));
}

#[test]
fn instance_out_of_range_is_rejected() {
    assert!(Plan::new(PathBuf::from("/src"), MAX_INSTANCE + 1).is_err());
}

#[test]
fn nodes_are_found_by_their_namespace_names() {
    let plan = plan(1);
    assert_eq!(plan.node_of_namespace(&plan.node(2).namespace).map(|node| node.number), Some(2));
    assert!(plan.node_of_namespace("fv1-node-vm").is_some_and(|node| node.is_vm()));
    assert!(plan.node_of_namespace("fv1-node-21").is_none());
    assert!(plan.node_of_namespace("fv1-control").is_none());
    assert!(plan.node_of_namespace("fv0-node-1").is_none());
    assert!(plan.node_of_namespace("fv1-node-0").is_none());
}

#[test]
fn overlap_is_found_in_both_directions() {
    let network = |text: &str| text.parse::<Network>().unwrap();
    assert!(network("10.0.0.0/8").overlaps(&network("10.210.0.0/24")));
    assert!(network("10.210.0.7").overlaps(&network("10.210.0.0/24")));
    assert!(!network("10.211.0.0/16").overlaps(&network("10.210.0.0/24")));
    assert!(network("0.0.0.0/0").overlaps(&network("10.210.0.0/24")));
    assert!("10.0.0.0/33".parse::<Network>().is_err());
}
