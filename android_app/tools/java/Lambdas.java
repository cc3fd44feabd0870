import java.util.*;
import org.objectweb.asm.*;
import org.objectweb.asm.tree.*;

/**
 * Turns lambdas made by LambdaMetafactory into small classes: captured values become fields, the interface's method
 * casts its arguments, calls the method that holds the lambda's body and boxes or casts what comes back.
 */
class Lambdas {
  final List<ClassNode> made = new ArrayList<>();

  /** Replaces one invokedynamic; a body that is private in {@code node} becomes package-private. */
  void replace(ClassNode node, MethodNode method, InvokeDynamicInsnNode dynamic) {
    Type interfaceType = Type.getReturnType(dynamic.desc);
    Type[] captured = Type.getArgumentTypes(dynamic.desc);
    Type erased = (Type) dynamic.bsmArgs[0];
    Handle body = (Handle) dynamic.bsmArgs[1];
    Type instantiated = (Type) dynamic.bsmArgs[2];

    ClassNode lambda = new ClassNode();
    lambda.version = Lower.JAVA_8;
    lambda.access = Opcodes.ACC_FINAL | Opcodes.ACC_SUPER | Opcodes.ACC_SYNTHETIC;
    lambda.name = node.name + "$$Lowered" + made.size();
    lambda.superName = "java/lang/Object";
    lambda.interfaces.add(interfaceType.getInternalName());
    Set<Type> bridges = new LinkedHashSet<>(List.of(erased));
    if (dynamic.bsm.getName().equals("altMetafactory")) alternatives(lambda, dynamic, bridges);

    String constructor = Type.getMethodDescriptor(Type.VOID_TYPE, captured);
    constructor(lambda, captured, constructor);
    for (Type bridge : bridges) call(lambda, dynamic.name, bridge, instantiated, captured, body);
    made.add(lambda);

    InsnList list = new InsnList();
    // The captured values lie on the stack before the object does, so a static factory takes them.
    String factory = Type.getMethodDescriptor(Type.getObjectType(lambda.name), captured);
    list.add(new MethodInsnNode(Opcodes.INVOKESTATIC, lambda.name, "make", factory));
    method.instructions.insertBefore(dynamic, list);
    method.instructions.remove(dynamic);
  }

  /** altMetafactory: flags, then marker interfaces, then further bridges. */
  static void alternatives(ClassNode lambda, InvokeDynamicInsnNode dynamic, Set<Type> bridges) {
    int flags = (Integer) dynamic.bsmArgs[3];
    int at = 4;
    if ((flags & 1) != 0) lambda.interfaces.add("java/io/Serializable");
    if ((flags & 2) != 0) {
      int count = (Integer) dynamic.bsmArgs[at++];
      for (int i = 0; i < count; i++) lambda.interfaces.add(((Type) dynamic.bsmArgs[at++]).getInternalName());
    }
    if ((flags & 4) != 0) {
      int count = (Integer) dynamic.bsmArgs[at++];
      for (int i = 0; i < count; i++) bridges.add((Type) dynamic.bsmArgs[at++]);
    }
  }

  static void constructor(ClassNode lambda, Type[] captured, String descriptor) {
    MethodNode init = new MethodNode(0, "<init>", descriptor, null, null);
    init.visitVarInsn(Opcodes.ALOAD, 0);
    init.visitMethodInsn(Opcodes.INVOKESPECIAL, "java/lang/Object", "<init>", "()V", false);
    MethodNode make = new MethodNode(
        Opcodes.ACC_STATIC, "make", Type.getMethodDescriptor(Type.getObjectType(lambda.name), captured), null, null);
    make.visitTypeInsn(Opcodes.NEW, lambda.name);
    make.visitInsn(Opcodes.DUP);
    int slot = 0;
    for (int i = 0; i < captured.length; i++) {
      lambda.fields.add(new FieldNode(Opcodes.ACC_FINAL, "c" + i, captured[i].getDescriptor(), null, null));
      init.visitVarInsn(Opcodes.ALOAD, 0);
      init.visitVarInsn(captured[i].getOpcode(Opcodes.ILOAD), slot + 1);
      init.visitFieldInsn(Opcodes.PUTFIELD, lambda.name, "c" + i, captured[i].getDescriptor());
      make.visitVarInsn(captured[i].getOpcode(Opcodes.ILOAD), slot);
      slot += captured[i].getSize();
    }
    init.visitInsn(Opcodes.RETURN);
    make.visitMethodInsn(Opcodes.INVOKESPECIAL, lambda.name, "<init>", descriptor, false);
    make.visitInsn(Opcodes.ARETURN);
    lambda.methods.add(init);
    lambda.methods.add(make);
  }

  static void call(ClassNode lambda, String name, Type erased, Type instantiated, Type[] captured, Handle body) {
    MethodNode m = new MethodNode(Opcodes.ACC_PUBLIC, name, erased.getDescriptor(), null, null);
    boolean constructs = body.getTag() == Opcodes.H_NEWINVOKESPECIAL;
    boolean isStatic = body.getTag() == Opcodes.H_INVOKESTATIC;
    if (constructs) {
      m.visitTypeInsn(Opcodes.NEW, body.getOwner());
      m.visitInsn(Opcodes.DUP);
    }
    List<Type> wanted = new ArrayList<>();
    if (!isStatic && !constructs) wanted.add(Type.getObjectType(body.getOwner()));
    wanted.addAll(List.of(Type.getArgumentTypes(body.getDesc())));
    int next = 0;
    for (int i = 0; i < captured.length; i++) {
      m.visitVarInsn(Opcodes.ALOAD, 0);
      m.visitFieldInsn(Opcodes.GETFIELD, lambda.name, "c" + i, captured[i].getDescriptor());
      convert(m, captured[i], wanted.get(next++));
    }
    Type[] given = erased.getArgumentTypes();
    Type[] meant = instantiated.getArgumentTypes();
    int slot = 1;
    for (int i = 0; i < given.length; i++) {
      m.visitVarInsn(given[i].getOpcode(Opcodes.ILOAD), slot);
      slot += given[i].getSize();
      convert(m, given[i], meant[i]);
      convert(m, meant[i], wanted.get(next++));
    }
    int opcode = switch (body.getTag()) {
      case Opcodes.H_INVOKESTATIC -> Opcodes.INVOKESTATIC;
      case Opcodes.H_INVOKEINTERFACE -> Opcodes.INVOKEINTERFACE;
      case Opcodes.H_NEWINVOKESPECIAL -> Opcodes.INVOKESPECIAL;
      // The body of an instance lambda is no longer private: another class calls it like any method.
      case Opcodes.H_INVOKESPECIAL, Opcodes.H_INVOKEVIRTUAL ->
          body.isInterface() ? Opcodes.INVOKEINTERFACE : Opcodes.INVOKEVIRTUAL;
      default -> throw new IllegalStateException(lambda.name + " calls its body in an unknown way: " + body);
    };
    m.visitMethodInsn(opcode, body.getOwner(), body.getName(), body.getDesc(), body.isInterface());
    Type result = constructs ? Type.getObjectType(body.getOwner()) : Type.getReturnType(body.getDesc());
    Type expected = erased.getReturnType();
    if (expected.getSort() == Type.VOID) {
      if (result.getSize() > 0) m.visitInsn(result.getSize() == 2 ? Opcodes.POP2 : Opcodes.POP);
    } else {
      convert(m, result, instantiated.getReturnType());
      convert(m, instantiated.getReturnType(), expected);
    }
    m.visitInsn(expected.getOpcode(Opcodes.IRETURN));
    lambda.methods.add(m);
  }

  static final Map<Integer, String[]> BOXES = Map.of(
      Type.BOOLEAN, new String[] {"java/lang/Boolean", "booleanValue"},
      Type.CHAR, new String[] {"java/lang/Character", "charValue"},
      Type.BYTE, new String[] {"java/lang/Byte", "byteValue"},
      Type.SHORT, new String[] {"java/lang/Short", "shortValue"},
      Type.INT, new String[] {"java/lang/Integer", "intValue"},
      Type.LONG, new String[] {"java/lang/Long", "longValue"},
      Type.FLOAT, new String[] {"java/lang/Float", "floatValue"},
      Type.DOUBLE, new String[] {"java/lang/Double", "doubleValue"});

  static boolean isObject(Type type) {
    return type.getSort() == Type.OBJECT || type.getSort() == Type.ARRAY;
  }

  static void convert(MethodNode m, Type from, Type to) {
    if (from.equals(to) || to.equals(Type.getType(Object.class)) && isObject(from)) return;
    if (isObject(from) && isObject(to)) {
      m.visitTypeInsn(Opcodes.CHECKCAST, to.getInternalName());
    } else if (isObject(from)) {
      String[] box = BOXES.get(to.getSort());
      m.visitTypeInsn(Opcodes.CHECKCAST, box[0]);
      m.visitMethodInsn(Opcodes.INVOKEVIRTUAL, box[0], box[1], "()" + to.getDescriptor(), false);
    } else if (isObject(to)) {
      String[] box = BOXES.get(from.getSort());
      m.visitMethodInsn(Opcodes.INVOKESTATIC, box[0], "valueOf", "(" + from.getDescriptor() + ")L" + box[0] + ";", false);
    } else {
      throw new IllegalStateException("a lambda that widens " + from + " to " + to + ": write it out");
    }
  }
}
