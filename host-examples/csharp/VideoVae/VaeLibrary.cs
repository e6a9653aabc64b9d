using System;
using System.Collections.Generic;

namespace VideoVae
{
    public sealed class VaeDevice
    {
        /// <summary>What <see cref="Vae(string, string, Action{VaeLogLevel, string})"/> takes.</summary>
        public string Id { get; internal set; }
        public string Name { get; internal set; }
        public DeviceType Type { get; internal set; }
        public int Index { get; internal set; }
        public ulong MemoryTotal { get; internal set; }
        public ulong MemoryFree { get; internal set; }
        /// <summary>What the driver knows a GPU by, as nvidia-smi prints it; empty for the CPU.</summary>
        public string Uuid { get; internal set; }
        /// <summary>Of a GPU; 0.0 for the CPU.</summary>
        public Version ComputeCapability { get; internal set; }
    }

    /// <summary>Something a host can run.</summary>
    public sealed class VaeNode
    {
        public string Id { get; internal set; }
        public string Label { get; internal set; }
        public string Help { get; internal set; }
        public IReadOnlyList<VaePort> Ports { get; internal set; }
        public IReadOnlyList<VaeParameter> Parameters { get; internal set; }
    }

    /// <summary>A tensor that goes into a node or comes out of it. Ports of one kind can be connected.</summary>
    public sealed class VaePort
    {
        public string Name { get; internal set; }
        public string Kind { get; internal set; }
        public string Help { get; internal set; }
        public bool IsInput { get; internal set; }
        public bool IsOptional { get; internal set; }
        public IReadOnlyList<ElementType> Elements { get; internal set; }
    }

    public enum ParameterKind
    {
        Int = Native.VVAE_PARAM_INT,
        Float = Native.VVAE_PARAM_FLOAT,
        Bool = Native.VVAE_PARAM_BOOL,
        Choice = Native.VVAE_PARAM_CHOICE,
        Bytes = Native.VVAE_PARAM_BYTES,
        Text = Native.VVAE_PARAM_TEXT,
    }

    /// <summary>A key of <see cref="Vae.Configure(string, string)"/>.</summary>
    public sealed class VaeParameter
    {
        public string Key { get; internal set; }
        public ParameterKind Kind { get; internal set; }
        public string Default { get; internal set; }
        public string Unit { get; internal set; }
        public string Help { get; internal set; }
        public bool TakesAuto { get; internal set; }
        public bool HasRange { get; internal set; }
        public double Min { get; internal set; }
        public double Max { get; internal set; }
        public double Step { get; internal set; }
        public IReadOnlyList<string> Choices { get; internal set; }
    }

    /// <summary>What the library says about itself. From any thread, at any time.</summary>
    public static unsafe class VaeLibrary
    {
        public static string Version { get { return Utf8.Text(Native.vvae_version()); } }

        /// <summary>Major and minor number of the ABI.</summary>
        public static Version AbiVersion
        {
            get
            {
                uint version = Native.vvae_abi_version();
                return new Version((int)(version >> 16), (int)(version & 0xffff));
            }
        }

        public static IReadOnlyList<VaeDevice> Devices { get { return List(Native.vvae_device_count(), Device); } }

        public static IReadOnlyList<VaeNode> Nodes { get { return List(Native.vvae_node_count(), Node); } }

        private static IReadOnlyList<T> List<T>(uint count, Func<uint, T> item)
        {
            var list = new List<T>();
            for (uint i = 0; i < count; i++) list.Add(item(i));
            return list;
        }

        private static VaeDevice Device(uint index)
        {
            var desc = new Native.vvae_device_desc { struct_size = (uint)sizeof(Native.vvae_device_desc) };
            Error.Check(Native.vvae_device_info(index, &desc));
            return new VaeDevice
            {
                Id = Utf8.Text(desc.id, 20), Name = Utf8.Text(desc.name, 128), Type = (DeviceType)desc.device_type,
                Index = desc.device_id, MemoryTotal = desc.memory_total, MemoryFree = desc.memory_free,
                Uuid = Utf8.Text(desc.uuid, 48),
                ComputeCapability = new Version((int)desc.compute_major, (int)desc.compute_minor),
            };
        }

        private static VaeNode Node(uint index)
        {
            var desc = new Native.vvae_node_desc { struct_size = (uint)sizeof(Native.vvae_node_desc) };
            Error.Check(Native.vvae_node_info(index, &desc));
            return new VaeNode
            {
                Id = Utf8.Text(desc.id), Label = Utf8.Text(desc.label), Help = Utf8.Text(desc.help),
                Ports = List(Native.vvae_port_count(index), port => Port(index, port)),
                Parameters = List(Native.vvae_param_count(index), param => Parameter(index, param)),
            };
        }

        private static VaePort Port(uint node, uint index)
        {
            var desc = new Native.vvae_port_desc { struct_size = (uint)sizeof(Native.vvae_port_desc) };
            Error.Check(Native.vvae_port_info(node, index, &desc));
            var elements = new List<ElementType>();
            for (uint i = 0; i < desc.dtype_count; i++) elements.Add((ElementType)desc.dtypes[i]);
            return new VaePort
            {
                Name = Utf8.Text(desc.name), Kind = Utf8.Text(desc.kind), Help = Utf8.Text(desc.help), Elements = elements,
                IsInput = desc.direction == Native.VVAE_PORT_INPUT, IsOptional = desc.optional == 1,
            };
        }

        private static VaeParameter Parameter(uint node, uint index)
        {
            var desc = new Native.vvae_param_desc { struct_size = (uint)sizeof(Native.vvae_param_desc) };
            Error.Check(Native.vvae_param_info(node, index, &desc));
            return new VaeParameter
            {
                Key = Utf8.Text(desc.key), Kind = (ParameterKind)desc.kind, Default = Utf8.Text(desc.default_value),
                Unit = Utf8.Text(desc.unit), Help = Utf8.Text(desc.help),
                TakesAuto = (desc.flags & Native.VVAE_PARAM_HAS_AUTO) != 0,
                HasRange = (desc.flags & Native.VVAE_PARAM_HAS_RANGE) != 0, Min = desc.min, Max = desc.max, Step = desc.step,
                Choices = List(desc.choice_count, choice => Utf8.Text(Native.vvae_choice(node, index, choice))),
            };
        }
    }
}
