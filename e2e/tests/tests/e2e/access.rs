//! RBAC of subresources.

use anyhow::ensure;
use ferrovirt_e2e_tests::{TIMEOUT, story};

use crate::manifests;

#[test]
fn subresources_follow_rbac() {
    story("rbac", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.apply(&format!(
            "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: viewers}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: 'viewer-{0}'}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: editors}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: 'editor-{0}'}}]
",
            s.namespace
        ))
        .await?;
        s.wait_running("box").await?;
        let (viewer, editor) = (format!("viewer-{}", s.namespace), format!("editor-{}", s.namespace));
        // Aggregated roles and bindings take effect with a delay: wait for the permitted case first.
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        while let Err(error) = s.virt(&["pause", "vmi", "box", "--as", &editor]).await {
            // The answer to a former request came too late.
            if error.to_string().contains("already paused") {
                break;
            }
            ensure!(tokio::time::Instant::now() < deadline, "an editor may pause: {error:#}");
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        }
        s.virt(&["unpause", "vmi", "box", "--as", &editor]).await?;
        for user in [viewer.as_str(), "nobody-at-all"] {
            for command in [["pause", "vmi", "box"].as_slice(), &["console", "box"], &["vnc", "box", "--proxy-only"]] {
                let mut args = command.to_vec();
                args.extend(["--as", user]);
                let refused = s.virt(&args).await.err().map(|e| e.to_string()).unwrap_or_default();
                ensure!(refused.contains("forbidden") || refused.contains("cannot"), "{user} {command:?}: {refused:?}");
            }
        }
        Ok(())
    });
}
