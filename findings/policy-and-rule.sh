#!/bin/sh
# Version: k8s.io/apiserver 0.36.3 (policies) and k8s.io/apiextensions-apiserver 0.36.3 (rules of custom resource definitions).
# Expected: a CEL expression means the same in a ValidatingAdmissionPolicy and in x-kubernetes-validations of the resource. The API
# reference of the policy promises it for equality and + of lists with type set or map, and for escaped names of fields.
# Seen: a policy reads the object without its schema, as plain JSON. Lists are compared and joined in their order, times are texts, and
# escaped names are missing. A number without a fraction is an int even if the schema says number: 2.0 in a request is a
# double, and an int once it is stored, so that one expression accepts an object when it is created and fails when its labels
# are patched later. A list literal of a constant and a field does not compile, although == between the two does.
# Consequence: in a policy, compare lists of type set or map by all(), and convert fields by double(), timestamp() and string().
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GOFLAGS=-mod=mod
go mod init finding 2>/dev/null
go get k8s.io/apiserver@v0.36.3 k8s.io/apiextensions-apiserver@v0.36.3 2>/dev/null || exit 3
cat >main.go <<'GO'
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/google/cel-go/cel"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structural "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	rules "k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	policies "k8s.io/apiserver/pkg/admission/plugin/cel"
	limits "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
)

const definition = `{"type": "object", "properties": {"spec": {"type": "object", "properties": {
	"ratio": {"type": "number"},
	"since": {"type": "string", "format": "date-time"},
	"x-class": {"type": "string", "maxLength": 9},
	"zones": {"type": "array", "maxItems": 9, "items": {"type": "string", "maxLength": 9}, "x-kubernetes-list-type": "set"},
	"ports": {"type": "array", "maxItems": 9, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
		"items": {"type": "object", "required": ["name"], "properties": {
			"name": {"type": "string", "maxLength": 9}, "port": {"type": "integer"}}}}}}}}`

func read(spec string) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	text := `{"apiVersion": "example.com/v1", "kind": "Gate", "metadata": {"name": "a"}, "spec": ` + spec + `}`
	if err := object.UnmarshalJSON([]byte(text)); err != nil {
		panic(err)
	}
	return object
}

// rule returns the result of the expression as a rule of the resource: true, false or an error.
func rule(expression string, object, old *unstructured.Unstructured) string {
	versioned, internal := apiextensionsv1.JSONSchemaProps{}, apiextensions.JSONSchemaProps{}
	if err := json.Unmarshal([]byte(definition), &versioned); err != nil {
		panic(err)
	}
	versioned.XValidations = apiextensionsv1.ValidationRules{{Rule: expression, Message: "refused"}}
	if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(&versioned, &internal, nil); err != nil {
		panic(err)
	}
	types, err := structural.NewStructural(&internal)
	if err != nil {
		panic(err)
	}
	refused, _ := rules.NewValidator(types, true, limits.PerCallLimit).
		Validate(context.Background(), nil, types, object.Object, old.Object, limits.RuntimeCELCostBudget)
	switch {
	case len(refused) == 0:
		return "true"
	case refused[0].Detail == "refused":
		return "false"
	default:
		return "error: " + refused.ToAggregate().Error()
	}
}

type condition string

func (c condition) GetExpression() string    { return string(c) }
func (c condition) ReturnTypes() []*cel.Type { return []*cel.Type{cel.BoolType} }

var compiler = policies.NewConditionCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))

// policy returns the result of the expression in a policy: true, false or an error.
func policy(expression string, object, old *unstructured.Unstructured) string {
	expression = strings.NewReplacer("oldSelf", "oldObject", "self", "object").Replace(expression)
	compiled := compiler.CompileCondition([]policies.ExpressionAccessor{condition(expression)},
		policies.OptionalVariableDeclarations{}, environment.StoredExpressions)
	kind := object.GroupVersionKind()
	attributes := &admission.VersionedAttributes{
		Attributes: admission.NewAttributesRecord(object, old, kind, "default", "a",
			schema.GroupVersionResource{Group: kind.Group, Version: kind.Version, Resource: "gates"}, "", admission.Update, nil, false, nil),
		VersionedObject: object, VersionedOldObject: old, VersionedKind: kind,
	}
	results, _, err := compiled.ForInput(context.Background(), attributes, nil, policies.OptionalVariableBindings{}, nil,
		limits.RuntimeCELCostBudget)
	if err == nil {
		err = results[0].Error
	}
	if err != nil {
		return "error: " + strings.Join(strings.Fields(err.Error()), " ")
	}
	return fmt.Sprint(results[0].EvalResult.Value())
}

func main() {
	sent := read(`{"ratio": 2.0, "since": "2026-01-02T03:04:05Z", "x-class": "b", "zones": ["a", "b"],
		"ports": [{"name": "x", "port": 1}, {"name": "y", "port": 2}]}`)
	old := read(`{"zones": ["b", "a"], "ports": [{"name": "y", "port": 2}, {"name": "x", "port": 1}]}`)
	written, err := sent.MarshalJSON()
	if err != nil {
		panic(err)
	}
	stored := &unstructured.Unstructured{}
	if err := stored.UnmarshalJSON(written); err != nil {
		panic(err)
	}
	same := true
	for _, row := range []struct {
		expression string
		object     *unstructured.Unstructured
		policy     string
	}{
		{`self.spec.zones == oldSelf.spec.zones`, stored, "false"},
		{`self.spec.ports == oldSelf.spec.ports`, stored, "false"},
		{`size(self.spec.zones + ["a", "c"]) == 3`, stored, "false"},
		{`self.spec.ratio * 1.5 == 3.0`, sent, "true"},
		{`self.spec.ratio * 1.5 == 3.0`, stored, "no such overload"},
		{`self.spec.since.getFullYear() == 2026`, stored, "no such overload"},
		{`self.spec.x__dash__class == "b"`, stored, "no such key: x__dash__class"},
		{`self.spec.zones[1] == "b" || self.spec.zones[1] == self.spec.zones[0]`, stored, "true"},
		{`self.spec.zones[1] in ["b", self.spec.zones[0]]`, stored, "expected type 'string' but found 'dyn'"},
		// The expressions that the consequence recommends.
		{`self.spec.zones.all(z, z in oldSelf.spec.zones) && size(self.spec.zones) == size(oldSelf.spec.zones)`, stored, "true"},
		{`double(self.spec.ratio) * 1.5 == 3.0`, stored, "true"},
		{`self.spec.zones[1] in ["b", string(self.spec.zones[0])]`, stored, "true"},
	} {
		inRule, inPolicy := rule(row.expression, row.object, old), policy(row.expression, row.object, old)
		fmt.Printf("%s\n  rule: %s, policy: %s\n", row.expression, inRule, inPolicy)
		same = same && inRule == "true" && strings.Contains(inPolicy, row.policy)
	}
	if !same {
		os.Exit(1)
	}
}
GO
go mod tidy 2>/dev/null || exit 3
go build -o finding . || exit 1
echo "k8s.io/apiserver and k8s.io/apiextensions-apiserver 0.36.3"
./finding
