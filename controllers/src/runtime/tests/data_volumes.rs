//! The creation of DataVolumes: the source that is checked is the source that is created.

use super::*;
use crate::runtime::DataVolumeCreation;

const REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
const DATA_VOLUMES: &str = "/apis/cdi.kubevirt.io/v1beta1/namespaces/n/datavolumes";

fn creation(spec: Value, adopts_claim: bool) -> Effect {
    let metadata = json!({"name": "root", "namespace": "n", "annotations": {"a": "b"}});
    Effect::create_data_volume(DataVolumeCreation {
        data_volume: serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap(),
        service_account: "builder".to_owned(),
        adopts_claim,
        regarding: ObjectReference::default(),
    })
}

fn answer(allowed: bool) -> Reply {
    Reply::Answer(201, json!({"metadata": {}, "spec": {}, "status": {"allowed": allowed}}))
}

fn created() -> Reply {
    Reply::Answer(201, object("root"))
}

fn data_source(spec: Value, status: Value) -> Reply {
    Reply::Answer(
        200,
        json!({"metadata": {"name": "fedora", "namespace": "images"}, "spec": {"source": spec}, "status": status}),
    )
}

fn reference() -> Value {
    json!({"sourceRef": {"kind": "DataSource", "namespace": "images", "name": "fedora"}})
}

fn claim(namespace: &str) -> Value {
    json!({"source": {"pvc": {"namespace": namespace, "name": "golden"}}})
}

/// Carries a creation out. Returns the outcome, the paths that were called, and the bodies.
async fn carried_out(effect: Effect, script: Vec<Reply>) -> (Outcome, Vec<String>, Vec<Value>) {
    let server = Server::new(script);
    let fixture = fixture(&server);
    let outcome = fixture.executor.carry_out("vm", vec![effect], None).await;
    let paths = server.requests().into_iter().map(|(_, path)| path).collect();
    (outcome, paths, server.bodies())
}

fn message(outcome: &Outcome) -> &str {
    let Outcome::Refused { reason: Some("FailedDataVolumeCreate"), message, .. } = outcome else {
        panic!("{outcome:?}")
    };
    message
}

#[tokio::test(start_paused = true)]
async fn right_to_clone_is_that_of_the_service_account_on_the_resolved_source() {
    let pvc = || json!({"pvc": {"namespace": "store", "name": "gen-2"}});
    let snapshot = || json!({"snapshot": {"namespace": "", "name": "snap"}});
    let pointer = || json!({"dataSource": {"name": "other", "namespace": "images"}});
    let of_snapshot = |answers: &[bool]| -> Vec<Reply> {
        let is_created = answers.last() == Some(&true);
        let answers = answers.iter().map(|is_granted| answer(*is_granted));
        let found = std::iter::once(data_source(snapshot(), Value::Null));
        found.chain(answers).chain(is_created.then(created)).collect()
    };
    /// Spec, script, number of reviews, namespace and name of the source, true if it is created.
    type Row = (Value, Vec<Reply>, usize, &'static str, &'static str, bool);
    let table: Vec<Row> = vec![
        (json!({"source": {"blank": {}}}), vec![created()], 0, "", "", true),
        (claim("n"), vec![created()], 0, "n", "golden", true),
        (claim("images"), vec![answer(true), created()], 1, "images", "golden", true),
        (claim("images"), vec![answer(false), answer(true), created()], 2, "images", "golden", true),
        (claim("images"), vec![answer(false), answer(false)], 2, "images", "golden", false),
        (reference(), vec![data_source(pvc(), Value::Null), answer(true), created()], 1, "store", "gen-2", true),
        (reference(), vec![data_source(pvc(), Value::Null), answer(false), answer(false)], 2, "store", "gen-2", false),
        (reference(), vec![data_source(snapshot(), Value::Null), answer(true), created()], 1, "images", "snap", true),
        // Pods read a snapshot by a claim only. Roles written for CDI name claims otherwise.
        (reference(), of_snapshot(&[false, true, true]), 3, "images", "snap", true),
        (reference(), of_snapshot(&[false, true, false, true, true]), 5, "images", "snap", true),
        (reference(), of_snapshot(&[false, true, false, true, false]), 5, "images", "snap", false),
        (reference(), of_snapshot(&[false, false, false]), 3, "images", "snap", false),
        (
            reference(),
            vec![data_source(pointer(), json!({"source": pvc()})), answer(true), created()],
            1,
            "store",
            "gen-2",
            true,
        ),
    ];
    for (spec, script, reviews, namespace, name, is_created) in table {
        let is_reference = spec.get("sourceRef").is_some();
        let (outcome, paths, bodies) = carried_out(creation(spec.clone(), false), script).await;
        assert_eq!(paths.iter().filter(|path| *path == REVIEWS).count(), reviews, "{spec}");
        for review in bodies.iter().filter(|body| body["kind"] == "SubjectAccessReview") {
            assert_eq!(review["spec"]["user"], "system:serviceaccount:n:builder");
            assert_eq!(
                review["spec"]["groups"],
                json!(["system:serviceaccounts", "system:serviceaccounts:n", "system:authenticated"])
            );
            assert_eq!(review["spec"]["resourceAttributes"]["namespace"], namespace);
        }
        if is_created {
            assert_eq!(outcome, Outcome::Done { succeeded: vec!["FailedDataVolumeCreate"] }, "{spec}");
            let written = bodies.last().unwrap();
            assert_eq!(paths.last().unwrap(), DATA_VOLUMES);
            assert_eq!(written["kind"], "DataVolume");
            assert_eq!(written["spec"]["sourceRef"], Value::Null, "{spec}");
            let kinds = written["spec"]["source"].as_object().unwrap();
            let source = kinds.values().next().unwrap();
            assert!(name.is_empty() || (source["namespace"] == namespace && source["name"] == name), "{written}");
        } else {
            assert!(!paths.contains(&DATA_VOLUMES.to_owned()), "{spec}");
            let message = message(&outcome);
            let expected = format!(
                "not authorized to create DataVolume: User system:serviceaccount:n:builder has insufficient permissions in clone \
                 source namespace {namespace}"
            );
            assert!(message.starts_with(&expected), "{message}");
            assert!(message.contains("create datavolumes/source") && message.contains(name), "{message}");
        }
        assert_eq!(
            is_reference,
            paths.iter().any(|path| path.ends_with("/namespaces/images/datasources/fedora")),
            "{paths:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn denial_stays_a_denial_for_an_existing_claim() {
    // It could be deleted, and the DataVolume would be filled from the source.
    let (outcome, paths, _) = carried_out(creation(claim("images"), true), vec![answer(false), answer(false)]).await;
    assert!(message(&outcome).starts_with("not authorized to create DataVolume"));
    assert!(!paths.contains(&DATA_VOLUMES.to_owned()));
}

#[tokio::test(start_paused = true)]
async fn refusals_say_what_was_attempted() {
    let refused = |message: &str| {
        let mut body = status(400, "BadRequest");
        body["message"] = json!(message);
        Reply::Answer(400, body)
    };
    let exists = "admission webhook denied the request: Destination PVC n/root already exists";
    let unready = json!({"conditions": [{"type": "Ready", "status": "False", "message": "No source PVC set"}]});
    let strange = json!({"sourceRef": {"kind": "DataSource", "namespace": "a/../b", "name": "fedora"}});
    let blank = || json!({"source": {"blank": {}}});
    for (spec, adopts, script, expected) in [
        (
            blank(),
            false,
            vec![refused("PVC size is missing")],
            Some("failed to create DataVolume: PVC size is missing"),
        ),
        (blank(), false, vec![refused(exists)], Some("Destination PVC n/root already exists")),
        (blank(), true, vec![refused(exists)], None),
        (
            reference(),
            false,
            vec![data_source(json!({}), unready)],
            Some("DataVolume sourceRef not supported: DataSource images/fedora names no source: No source PVC set"),
        ),
        (
            reference(),
            false,
            vec![Reply::Answer(404, status(404, "NotFound"))],
            Some("failed to create DataVolume: NotFound"),
        ),
        (strange, false, vec![], Some("DataVolume sourceRef not supported: DataSource a/../b/fedora")),
    ] {
        let calls = script.len();
        let (outcome, paths, _) = carried_out(creation(spec.clone(), adopts), script).await;
        assert_eq!(paths.len(), calls, "{spec}: {paths:?}");
        match expected {
            Some(expected) => assert!(message(&outcome).contains(expected), "{outcome:?}"),
            None => assert!(matches!(outcome, Outcome::Done { .. }), "{outcome:?}"),
        }
    }
}
