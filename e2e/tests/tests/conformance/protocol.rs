//! Reviews as kube-apiserver sends them.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::webhook::{Answer, Connection};
use serde_json::{Value, json};

use crate::{
    answers::{allowed, patched, refused, response},
    conformance, objects,
    reviews::{Review, bad, good, paths},
};

async fn ask(connection: &mut Connection, review: &Review) -> Result<Answer> {
    let said = connection.review(review.path, review.body()).await;
    said.with_context(|| format!("{} {}", review.path, review.request["operation"]))
}

#[test]
fn valid_objects_are_allowed() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for review in good() {
            let answer = ask(&mut connection, &review).await?;
            let response = allowed(&answer, &review.uid).with_context(|| review.path.to_owned())?;
            if !review.path.ends_with("-mutate") {
                ensure!(response.get("patch").is_none(), "{} patches", review.path);
            }
        }
        Ok(())
    });
}

#[test]
fn invalid_objects_are_denied_with_causes() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for review in bad() {
            let answer = ask(&mut connection, &review).await?;
            let response = refused(&answer, &review.uid).with_context(|| review.path.to_owned())?;
            ensure!(response["status"]["reason"] == "Invalid", "{}: {response}", review.path);
        }
        let review = Review::create("/virtualmachines-validate", objects::impossible_vm());
        let response = refused(&ask(&mut connection, &review).await?, &review.uid)?;
        let causes = response["status"]["details"]["causes"].as_array().cloned().unwrap_or_default();
        let field = "spec.template.spec.domain.devices.disks[0].name";
        let named = causes.iter().any(|cause| cause["field"] == field && cause["reason"] == "FieldValueInvalid");
        ensure!(named, "{field} is not named in {response}");
        Ok(())
    });
}

#[test]
fn many_causes_are_listed_in_part_and_counted() {
    conformance(async |endpoint| {
        let mut vm = objects::vm();
        let disks = (0..40).map(|index| json!({"name": format!("lost-{index}"), "disk": {"bus": "virtio"}}));
        vm["spec"]["template"]["spec"]["domain"]["devices"]["disks"] = disks.collect();
        let review = Review::create("/virtualmachines-validate", vm);
        let response = refused(&ask(&mut endpoint.connect().await?, &review).await?, &review.uid)?;
        let causes = response["status"]["details"]["causes"].as_array().map_or(0, Vec::len);
        ensure!(causes == 10, "{causes} causes");
        let message = response["status"]["message"].as_str().unwrap_or_default();
        ensure!(message.ends_with("more validation errors"), "{message}");
        Ok(())
    });
}

#[test]
fn a_patch_applied_twice_changes_nothing_more() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for (path, object) in
            [("/virtualmachines-mutate", objects::vm()), ("/virtualmachineinstances-mutate", objects::vmi())]
        {
            let first = Review::create(path, object.clone());
            let response = allowed(&ask(&mut connection, &first).await?, &first.uid)?;
            let (once, changed) = patched(&object, &response)?;
            ensure!(changed, "{path} sets no defaults");
            let (same, _) = patched(&once, &response)?;
            ensure!(same == once, "{path}: the same patch changes the object again");
            let second = Review::create(path, once.clone());
            let response = allowed(&ask(&mut connection, &second).await?, &second.uid)?;
            let (twice, _) = patched(&once, &response)?;
            ensure!(twice == once, "{path}: a second pass changes {once}\nto {twice}");
            let update = Review::update(path, once.clone(), once.clone());
            let response = allowed(&ask(&mut connection, &update).await?, &update.uid)?;
            let (later, _) = patched(&once, &response)?;
            ensure!(later == once, "{path}: an update without a change changes {once}\nto {later}");
        }
        Ok(())
    });
}

#[test]
fn defaulted_objects_are_valid() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for (mutate, validate, object) in [
            ("/virtualmachines-mutate", "/virtualmachines-validate", objects::vm()),
            ("/virtualmachineinstances-mutate", "/virtualmachineinstances-validate-create", objects::vmi()),
        ] {
            let review = Review::create(mutate, object.clone());
            let response = allowed(&ask(&mut connection, &review).await?, &review.uid)?;
            let review = Review::create(validate, patched(&object, &response)?.0);
            allowed(&ask(&mut connection, &review).await?, &review.uid)?;
        }
        Ok(())
    });
}

#[test]
fn what_the_user_wrote_is_kept() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for (path, object) in
            [("/virtualmachines-mutate", objects::vm()), ("/virtualmachineinstances-mutate", objects::vmi())]
        {
            let review = Review::create(path, object.clone());
            let response = allowed(&ask(&mut connection, &review).await?, &review.uid)?;
            let after = patched(&object, &response)?.0;
            ensure!(contains(&after, &object), "{path} changes {object}\nto {after}");
        }
        Ok(())
    });
}

/// Returns true if `whole` contains all of `part`. Lists may be longer.
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().all(|(key, part)| whole.get(key).is_some_and(|whole| contains(whole, part)))
        }
        (Value::Array(whole), Value::Array(part)) => {
            part.len() <= whole.len() && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
        }
        (whole, part) => whole == part,
    }
}

#[test]
fn repeated_requests_have_the_same_answer() {
    conformance(async |endpoint| {
        let (mut one, mut other) = (endpoint.connect().await?, endpoint.connect().await?);
        for review in good().into_iter().chain(bad()) {
            let first = response(&ask(&mut one, &review).await?, &review.uid)?;
            for connection in [&mut one, &mut other] {
                let again = response(&ask(connection, &review).await?, &review.uid)?;
                ensure!(again == first, "{}: {first}\nthen {again}", review.path);
            }
        }
        Ok(())
    });
}

#[test]
fn dry_runs_have_the_same_answer() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for mut review in good().into_iter().chain(bad()) {
            let real = response(&ask(&mut connection, &review).await?, &review.uid)?;
            review.request["dryRun"] = json!(true);
            review.request["options"]["dryRun"] = json!(["All"]);
            let dry = response(&ask(&mut connection, &review).await?, &review.uid)?;
            ensure!(dry == real, "{}: {real}\nin a dry run {dry}", review.path);
        }
        Ok(())
    });
}

#[test]
fn deletions_and_connections_get_an_answer() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for path in paths() {
            for review in [
                Review::new(path, "DELETE", Value::Null, objects::vm()),
                Review::new(path, "DELETE", Value::Null, Value::Null),
                Review::new(path, "CONNECT", json!({"kind": "NodeProxyOptions"}), Value::Null),
                Review::new(path, "CONNECT", Value::Null, Value::Null),
            ] {
                response(&ask(&mut connection, &review).await?, &review.uid).with_context(|| path.to_owned())?;
            }
        }
        Ok(())
    });
}

#[test]
fn missing_objects_are_reported() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for path in paths() {
            for (operation, object, old) in [
                ("CREATE", Value::Null, Value::Null),
                ("UPDATE", Value::Null, objects::vm()),
                ("UPDATE", objects::vm(), Value::Null),
                ("UPDATE", Value::Null, Value::Null),
                ("CREATE", json!({}), Value::Null),
                ("CREATE", json!("text"), Value::Null),
                ("UPDATE", json!([]), json!(7)),
            ] {
                let mut review = Review::new(path, operation, object, old);
                response(&ask(&mut connection, &review).await?, &review.uid).with_context(|| path.to_owned())?;
                // A missing object is the same as null.
                for field in ["object", "oldObject"] {
                    if review.request[field].is_null()
                        && let Some(request) = review.request.as_object_mut()
                    {
                        request.remove(field);
                    }
                }
                response(&ask(&mut connection, &review).await?, &review.uid).with_context(|| path.to_owned())?;
            }
        }
        for review in [
            Review::create("/virtualmachines-mutate", Value::Null),
            Review::create("/virtualmachines-validate", Value::Null),
            Review::create("/virtualmachineinstances-mutate", Value::Null),
            Review::create("/virtualmachineinstances-validate-create", Value::Null),
            Review::update("/virtualmachineinstances-validate-update", objects::vmi(), Value::Null),
            Review::update("/virtualmachines-validate", objects::vm(), Value::Null),
        ] {
            refused(&ask(&mut connection, &review).await?, &review.uid).with_context(|| review.path.to_owned())?;
        }
        Ok(())
    });
}

#[test]
fn unknown_kinds_and_versions_are_reported() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for path in paths() {
            let other = json!({"group": "other.example", "version": "v9", "resource": "things"});
            let mut review = Review::create(path, objects::vm());
            review.request["kind"] = json!({"group": "other.example", "version": "v9", "kind": "Thing"});
            review.request["resource"] = other.clone();
            review.request["requestResource"] = other;
            response(&ask(&mut connection, &review).await?, &review.uid).with_context(|| path.to_owned())?;
            let mut review = Review::create(path, objects::vm());
            review.request["object"]["apiVersion"] = json!("kubevirt.io/v9");
            review.request["object"]["kind"] = json!("Thing");
            response(&ask(&mut connection, &review).await?, &review.uid).with_context(|| path.to_owned())?;
        }
        for path in ["/virtualmachines-mutate", "/virtualmachines-validate"] {
            let mut review = Review::create(path, objects::vm());
            review.request["resource"] = json!({"group": "", "version": "v1", "resource": "pods"});
            refused(&ask(&mut connection, &review).await?, &review.uid)?;
        }
        Ok(())
    });
}

#[test]
fn unknown_fields_of_the_protocol_are_ignored() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        for mut review in good() {
            review.request["futureField"] = json!({"a": [1, {"b": null}]});
            review.request["userInfo"]["future"] = json!(true);
            let mut wire = review.wire();
            wire["future"] = json!("yes");
            let answer = connection.review(review.path, wire.to_string()).await?;
            allowed(&answer, &review.uid).with_context(|| review.path.to_owned())?;
        }
        Ok(())
    });
}

#[test]
fn unknown_fields_of_a_spec_are_denied_by_name() {
    conformance(async |endpoint| {
        let mut connection = endpoint.connect().await?;
        let mut vm = objects::vm();
        vm["spec"]["template"]["spec"]["domain"]["devices"]["flux"] = json!({"capacitor": 88});
        let mut vmi = objects::vmi();
        vmi["spec"]["domain"]["devices"]["flux"] = json!({"capacitor": 88});
        for review in [
            Review::create("/virtualmachines-validate", vm),
            Review::create("/virtualmachineinstances-validate-create", vmi),
        ] {
            let response = refused(&ask(&mut connection, &review).await?, &review.uid)?;
            let message = response["status"]["message"].as_str().unwrap_or_default();
            ensure!(message.contains("domain.devices.flux"), "{message}");
        }
        Ok(())
    });
}
