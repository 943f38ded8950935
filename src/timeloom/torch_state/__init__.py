"""What torch is set to or doing around a call: autocast, tracing, streams, transforms, tf32."""
