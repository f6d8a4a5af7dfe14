//! Parts of declarations that are the same for many resources.

/// Implements the access to the metadata of an object that keeps only the parts that are read.
macro_rules! reduced {
    () => {
        fn meta(&self) -> &kube::api::ObjectMeta {
            &self.metadata
        }
    };
}

/// Implements the access to the metadata of an object that is kept whole, and drops the metadata that no controller reads.
macro_rules! whole {
    () => {
        reduced!();

        fn trim(&mut self) {
            $crate::cache::trim_meta(&mut self.metadata);
            // Vectors that were parsed have room for more entries, copies have not.
            *self = self.clone();
        }
    };
}

/// Implements [`crate::cache::Cached`] for objects that no index finds.
macro_rules! unindexed {
    ($($kept:ident),+) => {$(
        impl $crate::cache::Cached for $kept {
            type Index = ();
            reduced!();
        }
    )+};
    (whole $kept:ident) => {
        impl $crate::cache::Cached for $kept {
            type Index = ();
            whole!();
        }
    };
}

/// Declares a resource of which parts are kept, or whose objects are kept whole, and the kind of the writes to it.
macro_rules! kept {
    (whole $object:ident $($rest:tt)*) => {
        kept!($object of $object $($rest)*);
    };
    ($kept:ident of $wire:ident $(written as $kind:ident)? $(, $presence:ident)?) => {
        impl $crate::resources::declaration::Declaration for $kept {
            type Wire = $wire;
            type Kept = Self;
            $(const PRESENCE: $crate::cache::Presence = $crate::cache::Presence::$presence;)?
            $(const WRITTEN: Option<$crate::runtime::Kind> = Some($crate::runtime::Kind::$kind);)?
        }
    };
}

/// Watches the resource in the install namespace only.
macro_rules! in_install_namespace {
    () => {
        fn api(client: kube::Client, install_namespace: &str) -> kube::Api<Self::Wire> {
            kube::Api::namespaced(client, install_namespace)
        }
    };
}

/// Names a kind of another project: its group, version and plural. Only parts of its objects are read.
macro_rules! outside_kind {
    ($kind:ident, $name:literal, $group:literal, $version:literal, $plural:literal, $scope:ident) => {
        impl k8s_openapi::Resource for $kind {
            const API_VERSION: &'static str = concat!($group, "/", $version);
            const GROUP: &'static str = $group;
            const KIND: &'static str = $name;
            const VERSION: &'static str = $version;
            const URL_PATH_SEGMENT: &'static str = $plural;
            type Scope = k8s_openapi::$scope;
        }

        impl k8s_openapi::Metadata for $kind {
            type Ty = kube::api::ObjectMeta;

            fn metadata(&self) -> &Self::Ty {
                &self.metadata
            }

            fn metadata_mut(&mut self) -> &mut Self::Ty {
                &mut self.metadata
            }
        }
    };
}
