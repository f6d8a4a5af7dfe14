//! Creations of pods whose name is taken.

use super::*;

/// Returns a launcher pod of the VMI with this UID.
fn pod(name: &str, vmi: &str) -> Value {
    let owner = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "m", "uid": vmi, "controller": true,
    });
    let labels = json!({"kubevirt.io": "virt-launcher"});
    json!({"metadata": {"name": name, "namespace": "n", "labels": labels, "ownerReferences": [owner]}})
}

fn own(name: &str) -> Value {
    pod(name, "u")
}

fn taken() -> Reply {
    Reply::Answer(409, status(409, "AlreadyExists"))
}

fn list(pods: &[Value]) -> Reply {
    Reply::Answer(200, json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": pods}))
}

#[tokio::test(start_paused = true)]
async fn pod_of_the_same_vmi_is_adopted_and_the_name_of_another_is_left_to_it() {
    let done = || Outcome::Done { succeeded: vec![] };
    let (foreign, bare) = (pod("a", "other"), json!({"metadata": {"name": "a"}}));
    let owners = own("a")["metadata"]["ownerReferences"].clone();
    let unlabelled = json!({"metadata": {"name": "a", "ownerReferences": owners}});
    let created = |name: &str| Reply::Answer(201, own(name));
    let quota = Reply::Answer(409, status(409, "Conflict"));
    let refusal = |message: &str| Outcome::Refused { reason: None, message: message.to_owned(), succeeded: vec![] };
    // Replies, outcome, stored pods, names that were tried
    for (script, outcome, stored, tried) in [
        (vec![created("a")], done(), &["a"][..], &["a"][..]),
        (vec![taken(), list(&[own("a")])], done(), &["a"], &["a"]),
        (vec![taken(), list(std::slice::from_ref(&foreign)), created("b")], done(), &["b"], &["a", "b"]),
        (vec![taken(), list(std::slice::from_ref(&bare)), taken(), list(&[own("b")])], done(), &["b"], &["a", "b"]),
        // It is gone, it is not shown by the watch, or the conflict is another one.
        (vec![taken(), list(&[])], Outcome::Stale, &[], &["a"]),
        (vec![taken(), list(&[unlabelled])], Outcome::Stale, &[], &["a"]),
        (vec![quota, list(&[])], Outcome::Stale, &[], &["a"]),
        (
            vec![taken(), list(&[foreign]), taken(), list(&[bare])],
            refusal("pods of others have the names a, b"),
            &[],
            &["a", "b"],
        ),
        (vec![Reply::Answer(403, status(403, "Forbidden"))], refusal("Forbidden"), &[], &["a"]),
    ] {
        let replies = script.len();
        let server = Server::new(script);
        let fixture = fixture(&server);
        let create = Effect::create(Kind::Pod, Some("n"), &own("")).unwrap();
        let create = create.under(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(fixture.executor.carry_out("fake", vec![create], None).await, outcome);
        let kept: Vec<String> = fixture.stored.0.lock().unwrap().iter().map(|(_, name)| name.clone()).collect();
        assert_eq!(kept, stored, "{outcome:?}");
        assert_eq!(server.requests().len(), replies, "{outcome:?}");
        let names: Vec<Value> = server.bodies().iter().map(|body| body["metadata"]["name"].clone()).collect();
        let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
        assert_eq!(names, tried, "{outcome:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn no_further_name_is_tried_after_leadership_was_lost() {
    let former: Arc<Mutex<Option<Leadership>>> = Arc::default();
    let lost = former.clone();
    let lose = move || lost.lock().unwrap().as_ref().unwrap().set(None);
    let foreign = json!({"metadata": {}, "items": [{"metadata": {"name": "a"}}]});
    let server = Server::new([taken(), Reply::After(Box::new(lose), foreign)]);
    let fixture = fixture(&server);
    *former.lock().unwrap() = Some(fixture.leadership.clone());
    let create = Effect::create(Kind::Pod, Some("n"), &own("")).unwrap();
    let create = create.under(vec!["a".to_owned(), "b".to_owned()]);
    assert_eq!(fixture.executor.carry_out("fake", vec![create], None).await, Outcome::NotLeading);
    assert_eq!(server.requests().len(), 2);
}
