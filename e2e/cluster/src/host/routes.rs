//! Conflicts of the cluster's networks with routes of the host.

use crate::{
    command::{program, run},
    error::{Error, Result},
    plan::{Network, Plan},
};

/// Returns the networks in the host's routes, from `ip -4 route show table all`, without default routes.
fn routed_networks(routes: &str) -> Vec<(Network, String)> {
    routes
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().peekable();
            while matches!(*words.peek()?, "local" | "broadcast" | "unicast" | "multicast") {
                words.next();
            }
            let network = words.next()?.parse().ok()?;
            Some((network, line.trim().to_owned()))
        })
        .collect()
}

/// Fails if the host already routes one of the cluster's networks elsewhere.
///
/// # Errors
/// Fails in that case, and if the routes cannot be listed.
pub fn check_routes(plan: &Plan) -> Result<()> {
    let routes = run("listing the host's routes", &mut program("ip", ["-4", "route", "show", "table", "all"]))?;
    let own = [plan.node_network(), plan.pods(), plan.services()];
    for (network, line) in routed_networks(&routes) {
        if own.iter().any(|own| own.overlaps(&network)) && network.prefix > 8 {
            return Err(Error::Refused(format!(
                "the host already has a route into the cluster's networks: `{line}`; choose another --instance"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_read_in_all_their_forms() {
        let routes = "default via 192.0.2.1 dev eth0\n10.210.0.0/24 dev fv0-host proto kernel\nlocal 10.210.0.254 dev fv0-host table local\n";
        let networks: Vec<String> = routed_networks(routes).iter().map(|(network, _)| network.to_string()).collect();
        assert_eq!(networks, ["10.210.0.0/24", "10.210.0.254/32"]);
    }
}
