// The plain Kotlin of core/. Its tests need fixtures that Python exports: run them with `make android-test`.
plugins {
    id("org.jetbrains.kotlin.jvm")
}

val gson: String by project

java {
    sourceCompatibility = JavaVersion.VERSION_1_8
    targetCompatibility = JavaVersion.VERSION_1_8
}

kotlin {
    compilerOptions {
        jvmTarget.set(org.jetbrains.kotlin.gradle.dsl.JvmTarget.JVM_1_8)
    }
}

// The tests stay Maven's.
sourceSets["test"].kotlin.setSrcDirs(emptyList<String>())

dependencies {
    implementation("com.google.code.gson:gson:$gson")
}
